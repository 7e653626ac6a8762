"""The options of every command that loads a model, and loading by them."""

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from nextn.cli.common import (
    HEAD_SOURCES,
    SOURCES,
    Device,
    check_device,
    open_checkpoint,
    shipped_option,
    shipped_path,
    user_cache,
)
from nextn.cli.screen import print_note
from nextn.errors import CheckpointError, ConfigError, FamilyError
from nextn.settings import BACKENDS, KV_CACHE_DTYPES, WEIGHTS, available_cores

if TYPE_CHECKING:
    import torch

    from nextn.model.model import Model

_DTYPES = ("auto", "float32", "bfloat16")
_AUTO = "auto"  # of --weights


@dataclass(frozen=True)
class ModelOptions:
    """The options of every command that loads a model.

    `source` is a checkpoint folder or hub id; a .gguf file until `prepared`.
    """

    source: Annotated[
        str,
        Argument(
            metavar="model", help=f"Checkpoint folder, .gguf file, {SOURCES}", callback=shipped_path, show_default=False
        ),
    ]
    dtype: Annotated[str, Option(help="float32, bfloat16, or auto: as stored.")] = "auto"
    exact_head: Annotated[
        bool,
        Option(
            "--exact-head",
            help="Draft with the stored weights. Default: 4 bits for the lm_head of a large vocabulary, and 7 bits for "
            "a bf16 head if the CPU has AVX512-BF16 but no AMX.",
        ),
    ] = False
    backend: Annotated[
        str, Option(help="torch, native (C++ runtime, CPU only), or auto: native if it supports the model and device.")
    ] = "auto"
    weights: Annotated[
        str,
        Option(
            help="stored, or int8 or int4: decode with quantized weights (native backend only); auto: the fastest of "
            "them whose divergence from float32, which is measured, is small."
        ),
    ] = "stored"
    threads: Annotated[
        int | None,
        Option(help="Threads that decode on the CPU, natively or in torch. Default: torch's, as `nextn env` shows."),
    ] = None
    kv_cache_dtype: Annotated[
        str,
        Option(help="auto: as the model; int8: a byte per value, a scale per position and head (native backend only)."),
    ] = "auto"
    device: Device = "auto"
    device_map: Annotated[
        str | None,
        Option(
            help="Spread the decoder layers: auto (GPUs, then host memory, then disk), equal shares on places such as "
            "cuda:0,cuda:1,cpu,disk, or a .json file of names and places."
        ),
    ] = None
    head: Annotated[
        str | None,
        Option(help=f"Use the head of this checkpoint instead: {HEAD_SOURCES}", callback=shipped_option),
    ] = None
    _gguf: str | None = None  # the file that `source` was converted from, see `prepared`

    def check(self) -> None:
        """Refuse options that no model can be loaded with, before torch is imported.

        Hub ids are not looked up here; a local checkpoint is opened. A GGUF file is refused: see `prepared`. Raises
        ConfigError if the dtype, backend, device type, or type of weights or of the KV cache is unknown, or they
        exclude each other, or there are more threads than cores; CheckpointError if there is no such checkpoint.
        """
        self._check_values()
        self._check_sources()

    def prepared(self, *, need_head: bool = False) -> "ModelOptions":
        """Check the options, and return them with the checkpoint folder of a GGUF file, converted in the user's cache.

        need_head: Refuse a GGUF file without a head before it is converted, which may take minutes.
        Raises as `check` and `converted_gguf`.
        """
        self._check_values()
        is_gguf = self.source.endswith(".gguf") and Path(self.source).is_file()
        if is_gguf and need_head and self.head is None:
            _refuse_without_head(self.source)
        options = self._converted() if is_gguf else replace(self, _gguf=None)
        options._check_sources()
        return options

    @property
    def given(self) -> str:
        """The model as the user named it: of a prepared GGUF file, not the folder that it was converted to."""
        return self._gguf or self.source

    def _converted(self) -> "ModelOptions":
        from nextn import __version__
        from nextn.edit.gguf_cache import converted_gguf
        from nextn.edit.gguf_layout import HEAD_FOLDER

        cache = user_cache("gguf")
        folder = converted_gguf(Path(self.source), cache, version=__version__, note=print_note)
        head = folder / HEAD_FOLDER
        apart = str(head) if self.head is None and head.is_dir() else self.head
        return replace(self, source=str(folder), head=apart, _gguf=self.source)

    def _check_values(self) -> None:
        choices = {
            "dtype": _DTYPES,
            "backend": BACKENDS,
            "weights": (*WEIGHTS, _AUTO),
            "kv_cache_dtype": KV_CACHE_DTYPES,
        }
        for name, known in choices.items():
            if (value := getattr(self, name)) not in known:
                raise ConfigError(f"{name} {value!r}; expected one of {', '.join(known)}")
        check_device(self.device)
        if self.threads is not None and not 1 <= self.threads <= available_cores():
            raise ConfigError(
                f"--threads {self.threads}; expected 1 to {available_cores()}, the cores that this process may use"
            )
        if self.native_only and (self.backend == "torch" or self.device not in ("auto", "cpu")):
            raise ConfigError(
                f"{' and '.join(self.native_only)} excludes --backend torch and devices other than cpu: only the "
                "native backend has it, and it runs on CPUs"
            )
        self._check_device_map()

    def _check_sources(self) -> None:
        from nextn.checkpoint.remote import split_hub_id

        if split_hub_id(self.source) is None or Path(self.source).exists():
            open_checkpoint(self.source)
        if self.head is not None and Path(self.head).exists():
            open_checkpoint(self.head)

    def _check_device_map(self) -> None:
        if self.device_map is not None and (self.backend == "native" or self.native_only):
            raise ConfigError(
                f"--device-map {self.device_map} excludes {' and '.join(self.native_only) or '--backend native'}: the "
                "native backend has all layers in memory"
            )

    @property
    def native_only(self) -> list[str]:
        """The options that only the native backend has."""
        options = {"--weights": (self.weights, WEIGHTS), "--kv-cache-dtype": (self.kv_cache_dtype, KV_CACHE_DTYPES)}
        return [f"{name} {value}" for name, (value, known) in options.items() if value != known[0]]

    @property
    def torch_dtype(self) -> "torch.dtype | None":
        """The dtype for `Model.load`."""
        import torch

        return None if self.dtype == "auto" else getattr(torch, self.dtype)

    def load(self, *, need_head: bool, stream: bool = False, in_torch: bool = False) -> "Model":
        """Load the model, streamed as by `Model.load`; call `prepared` first.

        `in_torch`: the trunk will run in torch whatever the backend is, so quantized weights are dequantized.
        """
        import torch

        from nextn.model.device_map import check_accelerate, spread_layers
        from nextn.model.model import Model
        from nextn.runtime.backend import unused_codes

        if self.threads is not None:
            torch.set_num_threads(self.threads)  # before the native runtime is loaded, whose team has as many
        if self.device_map is not None:
            check_accelerate()
        loaded = Model.load(
            self.source,
            dtype=self.torch_dtype,
            need_head=need_head,
            device="cpu" if self.native_only else self.device,
            stream=stream,
            defer=self.device_map is not None,
            head=self.head if need_head else None,
        )
        loaded.trunk.kv_cache_dtype = self.kv_cache_dtype
        if self.weights == _AUTO:
            self._choose_weights(loaded)
        else:
            loaded.trunk.weights = self.weights
        if loaded.head is not None:
            loaded.head.exact = self.exact_head
        if in_torch or self.backend == "torch" or self.device_map is not None:
            loaded.dequantize()
        if self.device_map is not None:
            print_note(f"decoder layers: {spread_layers(loaded.trunk, self.device_map, user_cache('offload'))}")
        loaded.notes += tuple(unused_codes(loaded))
        return loaded

    def _choose_weights(self, loaded: "Model") -> None:
        """Measure weights of few bits on built-in text, and note what was found."""
        import torch

        from nextn.evaluate.accuracy import CONTEXT, MAX_KL, Reference, choose_weights, compared_texts
        from nextn.model.model import Model

        context = min(CONTEXT, loaded.trunk.max_length or CONTEXT)
        texts = compared_texts(loaded.tokenizer, num_tokens=CONTEXT, context=context).tokens
        exact = Model.load(self.source, dtype=torch.float32, need_head=False, skip_head=True, stream=True)
        found = choose_weights(loaded, Reference.of(exact.trunk, texts), source=self.source)
        figures = ", ".join(f"{each.weights} {each.accuracy.kl_mean:.2g}" for each in found)
        print_note(
            f"--weights {loaded.trunk.weights}: mean KL from float32 {figures} nats, on {found[0].accuracy.positions} "
            f"tokens; at most {MAX_KL} is taken"
        )


def _refuse_without_head(gguf: str) -> None:
    from nextn.checkpoint.gguf_file import GgufFile
    from nextn.family_table import by_config

    opened = GgufFile.open(Path(gguf))  # before torch is imported, as what is no GGUF file is refused at once
    from nextn.edit.gguf_architectures import architecture_of

    architecture, metadata = architecture_of(opened)
    if not metadata.num_modules:
        try:
            by_config({"model_type": architecture.model_type})
        except FamilyError as error:  # published without a head
            raise FamilyError(f"{gguf}: {error}") from error
        file = shlex.quote(gguf)
        raise CheckpointError(
            f"{gguf}: holds no MTP head. Give a file that has it (llama.cpp's converter leaves it out with --no-mtp), "
            "name one with --head, or decode without (-k 0). To add the base model's: "
            f"`nextn convert {file} OUT`, then `nextn restore OUT --from BASE`; `nextn train` makes a new one."
        )

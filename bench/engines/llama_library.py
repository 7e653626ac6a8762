"""llama.cpp in this process, through the ctypes bindings of llama-cpp-python: timed passes, and log-probabilities."""

import ctypes
import importlib
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from engines import environments
from numpy.typing import NDArray
from torch import Tensor

_MTP = 1  # LLAMA_CONTEXT_TYPE_MTP
_CONTEXT = 1024


def bindings(root: Path) -> types.ModuleType:
    """Return the bindings over the library that `setup` built."""
    # An empty package, as the bindings' own __init__ imports what is not needed and not installed.
    package = types.ModuleType("llama_cpp")
    package.__path__ = [str(environments.llama_bindings(root))]
    sys.modules.setdefault("llama_cpp", package)
    os.environ["LLAMA_CPP_LIB_PATH"] = str(environments.llama_server(root).parent)
    library = importlib.import_module("llama_cpp.llama_cpp")
    library.llama_log_set(_silent, ctypes.c_void_p(0))
    library.llama_backend_init()
    return library


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _silent(level: int, text: bytes, data: object) -> None:
    pass


class LlamaModel:
    """A GGUF file with contexts for plain steps, for verification and for drafts, if there are any; one sequence."""

    def __init__(self, root: Path, gguf: Path, *, threads: int, num_speculative_tokens: int) -> None:
        self.api = bindings(root)
        params = self.api.llama_model_default_params()
        params.load_mtp = True
        self.model = self.api.llama_model_load_from_file(str(gguf).encode(), params)
        if not self.model:
            raise ValueError(f"{gguf}: llama.cpp does not load it")
        self.threads, self.weight_bytes = threads, self.api.llama_model_size(self.model)
        self.vocab_size = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self.model))
        self.width = self.api.llama_model_n_embd_out(self.model)
        # As in llama-server: recurrent states of a verification are kept for each position, so it can be rolled back.
        self.contexts = {"plain": self._context(), "verify": self._context(n_rs_seq=num_speculative_tokens + 1)}
        if num_speculative_tokens:
            self._make_drafts()
        self.filled: dict[str, int] = {}

    def _make_drafts(self) -> None:
        library = self.api._lib
        # C++ functions of llama-ext.h, which the server's draft-mtp calls.
        self.nextn_states = library["_Z30llama_get_embeddings_nextn_ithP13llama_contexti"]
        self.nextn_states.restype = ctypes.POINTER(ctypes.c_float)
        set_states = library["_Z26llama_set_embeddings_nextnP13llama_contextbb"]
        self.contexts["draft"] = self._context(ctx_type=_MTP, ctx_other=self.contexts["verify"])
        set_states(ctypes.c_void_p(self.contexts["verify"]), ctypes.c_bool(True), ctypes.c_bool(False))
        set_states(ctypes.c_void_p(self.contexts["draft"]), ctypes.c_bool(True), ctypes.c_bool(True))

    def prefill(self, tokens: Sequence[int]) -> None:
        """Start all contexts with these positions."""
        states = np.ones((len(tokens), self.width), np.float32)
        for name, context in self.contexts.items():
            self.api.llama_memory_clear(self.api.llama_get_memory(context), True)
            self._decode(name, tokens, states if name == "draft" else None)
            self.filled[name] = len(tokens)

    def verify(self, num_positions: int) -> list[int]:
        """Run a pass and return the most probable tokens. One position is a plain step, which stays in its context."""
        if num_positions == 1:
            return self._decode("plain", [0]).argmax(-1).tolist()
        best = self._decode("verify", [0] * num_positions, outputs=num_positions).argmax(-1).tolist()
        self._rollback("verify")
        return best

    def next_token(self, token: int) -> int:
        """Append a token to the plain context and return the most probable next one."""
        return int(self._decode("plain", [token])[0].argmax())

    def draft(self, k: int) -> list[int]:
        tokens, state = [0], np.ones((1, self.width), np.float32)
        for _ in range(k):
            tokens.append(int(self._decode("draft", tokens[-1:], state)[0].argmax()))
            state = np.ctypeslib.as_array(self.nextn_states(ctypes.c_void_p(self.contexts["draft"]), 0), state.shape)
        self._rollback("draft")
        return tokens[1:]

    def log_probs(self, text: Sequence[int]) -> Tensor:
        """Log-probabilities [positions, V] at all positions of a text, which ends what the contexts held."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self.contexts["plain"]), True)
        logits = self._decode("plain", text, outputs=len(text))
        return torch.from_numpy(logits.copy()).log_softmax(-1)

    def close(self) -> None:
        for name in reversed(self.contexts):
            self.api.llama_free(self.contexts[name])
        self.api.llama_model_free(self.model)

    def _context(self, **options: object) -> int:
        params = self.api.llama_context_default_params()
        sizes = {"n_ctx": _CONTEXT, "n_batch": _CONTEXT, "n_ubatch": 512, "n_seq_max": 1}
        for name, value in {**sizes, "n_threads": self.threads, "n_threads_batch": self.threads, **options}.items():
            setattr(params, name, value)
        context = self.api.llama_init_from_model(self.model, params)
        if not context:
            raise ValueError("llama.cpp makes no such context of this model")
        return context

    def _decode(
        self, name: str, tokens: Sequence[int], states: NDArray[np.float32] | None = None, *, outputs: int = 1
    ) -> NDArray[np.float32]:
        """Append tokens and return the logits of the last `outputs` of them."""
        count = len(tokens)
        wanted = [index >= count - outputs for index in range(count)]
        batch = self.api.llama_batch(n_tokens=count, token=(ctypes.c_int32 * count)(*tokens))
        batch.logits = (ctypes.c_int8 * count)(*wanted)
        if states is not None:
            batch.embd = states.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        if code := self.api.llama_decode(self.contexts[name], batch):
            raise ValueError(f"llama_decode answered {code}")
        logits = self.api.llama_get_logits(self.contexts[name])
        return np.ctypeslib.as_array(logits, (outputs, self.vocab_size))

    def _rollback(self, name: str) -> None:
        removed = self.api.llama_memory_seq_rm(self.api.llama_get_memory(self.contexts[name]), 0, self.filled[name], -1)
        assert removed, "llama.cpp cannot remove these positions"

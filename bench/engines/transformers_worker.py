"""transformers' `generate`, plain and with `use_mtp=True`, as a worker. Options: checkpoint, dtype.

The number of drafts is that of the head's MTP layers: transformers does not run one again for deeper drafts.
"""

import time

import torch
import transformers
from protocol import Answer, Engine, Request, serve
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING


class Clock(BaseStreamer):
    """The tokens of each round, and when the first and the last round ended. `generate` puts the prompt first."""

    def __init__(self) -> None:
        self.parts: list[list[int]] = []
        self.started = self.ended = 0.0

    def put(self, value: torch.Tensor) -> None:
        self.ended = time.perf_counter()
        self.parts.append(value.flatten().tolist())
        if len(self.parts) <= 2:
            self.started = self.ended

    def end(self) -> None:
        pass


def load(options: dict[str, str]) -> Engine:
    config = AutoConfig.from_pretrained(options["checkpoint"])
    if getattr(config, "num_mtp_layers", None) is None:
        config.num_mtp_layers = config.num_nextn_predict_layers
    modules = config.num_mtp_layers
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    # transformers finds the head by patterns with the released number of trunk layers; this trunk has another.
    heads = "|".join(str(config.num_hidden_layers + index) for index in range(modules))
    patterns = [*(model_class._keys_to_ignore_on_load_unexpected or []), rf"model\.layers\.({heads})\."]
    model_class._keys_to_ignore_on_load_unexpected = patterns
    dtype = getattr(torch, options["dtype"])
    model = AutoModelForCausalLM.from_pretrained(options["checkpoint"], config=config, dtype=dtype).eval()

    def decode(request: Request) -> Answer:
        if request.num_speculative_tokens not in (0, modules):
            raise ValueError(
                f"num_speculative_tokens = {request.num_speculative_tokens}; `use_mtp` drafts as many tokens as the "
                "head has MTP layers"
            )
        prompt, clock = torch.tensor([request.prompt]), Clock()
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            use_mtp=bool(request.num_speculative_tokens),
            do_sample=False,
            max_new_tokens=request.max_tokens,
            eos_token_id=request.eos or None,
            pad_token_id=0,
            streamer=clock,
        )
        return Answer.of(clock.parts[1:], clock.ended - clock.started, request)

    flags = {
        "dtype": options["dtype"],
        "threads": torch.get_num_threads(),
        "attention": model.config._attn_implementation,
        "modules": modules,
    }
    return Engine(decode, {"transformers": transformers.__version__, "torch": torch.__version__}, flags)


if __name__ == "__main__":
    serve(load)

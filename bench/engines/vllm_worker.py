"""vLLM on CPUs as a worker. Options: checkpoint, dtype, eager, context, num_speculative_tokens (of this engine: fixed
at its start), counts (whether it counts its drafts, as its server does), attention (its backend; default: its own
choice), draft (a separate draft's checkpoint), overrides (of the trunk's config).

The engine runs in this process and is stepped by hand: no second process, no server; the output of a step is a round.
"""

import time

import torch
import vllm
from prometheus_client import generate_latest
from protocol import Answer, Engine, Request, serve
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

KV_BYTES = 2**28


def load(options: dict) -> Engine:
    k = options["num_speculative_tokens"]
    settings = {
        "dtype": options["dtype"],
        "enforce_eager": options["eager"],
        "max_model_len": options["context"],
        "max_num_seqs": 1,
        "kv_cache_memory_bytes": KV_BYTES,
        "enable_prefix_caching": False,
        "disable_log_stats": not options.get("counts", False),
        "speculative_config": {"method": "mtp", "num_speculative_tokens": k} if k else None,
        "hf_overrides": options.get("overrides", {}),
    }
    if options.get("draft") and k:
        settings["speculative_config"]["model"] = options["draft"]
    if options.get("attention"):
        settings["attention_config"] = {"backend": options["attention"]}
        if k:
            settings["speculative_config"]["attention_backend"] = options["attention"]
    engine = LLM(options["checkpoint"], skip_tokenizer_init=True, **settings).llm_engine

    def decode(request: Request) -> Answer:
        if request.num_speculative_tokens != k:
            raise ValueError(
                f"num_speculative_tokens = {request.num_speculative_tokens}; this engine was started with {k}"
            )
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=request.max_tokens,
            stop_token_ids=request.eos,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        engine.add_request("one", {"prompt_token_ids": request.prompt}, sampling)
        parts: list[list[int]] = []
        while engine.has_unfinished_requests():
            parts += [list(output.outputs[0].token_ids) for output in engine.step() if output.outputs[0].token_ids]
            ended = time.perf_counter()
            if len(parts) <= 1:
                started = ended
        return Answer.of(parts, ended - started, request)

    flags = {**settings, "threads": torch.get_num_threads()}
    return Engine(
        decode,
        {"vllm": vllm.__version__, "torch": torch.__version__},
        flags,
        metrics=(lambda: generate_latest().decode()) if options.get("counts") else None,
        close=engine.engine_core.shutdown,
    )


if __name__ == "__main__":
    serve(load)

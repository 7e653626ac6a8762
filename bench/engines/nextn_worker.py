"""This package as a worker, decoding as `nextn bench` does. Options: checkpoint, dtype, weights."""

import time

import torch
from protocol import Answer, Engine, Request, serve

import nextn
from nextn.decoding.rounds import rounds
from nextn.model.model import Model
from nextn.runtime.backend import backend_for
from nextn.settings import Settings


def load(options: dict[str, str]) -> Engine:
    model = Model.load(options["checkpoint"], dtype=getattr(torch, options["dtype"]))
    model.trunk.weights = options.get("weights", "stored")
    engine = backend_for(model, options.get("backend", "auto"))

    def decode(request: Request) -> Answer:
        settings = Settings(
            num_speculative_tokens=request.num_speculative_tokens, max_tokens=request.max_tokens, eos=tuple(request.eos)
        )
        stream = rounds(engine.trunk, engine.head, [request.prompt], settings)
        log = [next(stream)]
        started = time.perf_counter()
        log += stream
        seconds = time.perf_counter() - started
        rows = [each.rows[0] for each in log]
        drafted, num_accepted = sum(len(row.drafts) for row in rows), sum(row.num_accepted for row in rows)
        return Answer([token for row in rows for token in row.emitted], seconds, len(rows) - 1, drafted, num_accepted)

    flags = {"dtype": options["dtype"], "threads": torch.get_num_threads(), "backend": engine.name}
    return Engine(decode, {"nextn": nextn.__version__, "torch": torch.__version__}, flags)


if __name__ == "__main__":
    serve(load)

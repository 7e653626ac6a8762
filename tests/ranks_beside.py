"""One rank of a Trainer with a head beside it: its weights after two steps go to a file. For `test_hook`."""

import os
import sys

import torch
from test_trainer_hook import Phrases, load, state, trainer_of

from nextn.train.cotrain import HeadSettings
from nextn.train.trainer_hook import train_head

base, out = sys.argv[1:]
world = int(os.environ.get("WORLD_SIZE", "1"))
model = load(base)
run = trainer_of(
    model, out, data=Phrases(16), per_device_train_batch_size=4 // world, gradient_accumulation_steps=2, optim="sgd",
    learning_rate=0.05, ddp_backend="gloo" if world > 1 else None,
)  # fmt: skip
head = train_head(run, base, HeadSettings(joint=True, depths=3))
run.train()
if run.args.should_save:
    reported = {key: torch.tensor(value) for key, value in run.state.log_history[1].items() if "head" in key}
    torch.save(state(model) | state(head) | reported, f"{out}.pt")
if torch.distributed.is_initialized():
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a thread of gloo may still run, and then the interpreter's end aborts the process

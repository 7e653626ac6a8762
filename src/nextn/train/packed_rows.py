"""Which tokens of a batch belong to one document, from every marking that collators of packed rows make.

transformers' DataCollatorWithFlattening: restarting `position_ids`, `cu_seq_lens_q`, `seq_idx`. TRL: `position_ids`,
from `seq_lengths` of its packed data sets. LLaMA-Factory: an attention mask that numbers the documents, or the mask of
four dimensions made of it. Axolotl: a numbered attention mask, with or without restarting positions. Unsloth:
`packed_seq_lengths`. ms-swift: `text_position_ids`. Several markings at once mean the union of their boundaries: nobody
sees that a head learns across documents; a boundary too many costs one label.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor

from nextn.errors import ConfigError

_ENDS = ("cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k")
_TOKENS = ("input_ids", "labels", "shift_labels")
_PADDED = "_padded"  # ends in the layout of the tokens, where documents are padded; those without it count no padding
# Names that look like a marking. A batch with one of them is refused where nothing else marks more than one document.
_LIKE_MARKING = re.compile(
    r"(?!max_|num_).*(?:cu_?seq|cumulative|varlen|pack|boundar|segment|eod_|seq(?:uence)?_?(?:len|start|mask)).*"
    r"|mask|.*(?:attn|attention|block|diag)_?(?:mask|bias).*|(?:.*_)?len(?:gth)?s"
    r"|.*(?:sample|example|document|doc|seq|sequence|chunk)_(?:ids?|idx|index|starts?|start_.*)"
)


def document_indices(inputs: Mapping[str, object], tokens: Tensor) -> Tensor:
    """Return [B, T] int64: the number of each token's document within its row, -1 for padding.

    Raises ConfigError for a marking that is not known, or that does not fit the tokens.
    """
    inputs = dict(_with_fields(inputs))
    starts, is_padding = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros_like(tokens, dtype=torch.bool)
    for name, value in inputs.items():
        reader = _READERS.get(name)
        if reader is not None and name + _PADDED not in inputs:
            new_starts, new_padding = reader(name, value, tokens)
            starts, is_padding = starts | new_starts, is_padding | new_padding
    if not starts[:, 1:].any():
        _refuse_unread(inputs, tokens)
    return starts.cumsum(-1).masked_fill(is_padding, -1)


def _with_fields(inputs: Mapping[str, object], depth: int = 2) -> Iterator[tuple[str, object]]:
    """Yield the values of a batch, and those inside others, as in the `flash_attn_kwargs` of NeMo RL."""
    for name, value in inputs.items():
        fields = value._asdict() if hasattr(value, "_asdict") else getattr(value, "__dict__", value)
        if value is not None:
            yield name, value
        if isinstance(fields, Mapping) and not isinstance(value, Tensor) and name not in _READERS and depth:
            yield from _with_fields(fields, depth - 1)


def _refuse_unread(inputs: Mapping[str, object], tokens: Tensor) -> None:
    """Raise ConfigError for a value that looks like a marking and has more entries than one document a row needs."""
    for name, value in inputs.items():
        if name in (*_READERS, *_TOKENS):
            continue
        if not _LIKE_MARKING.fullmatch(name):
            if "mask" not in name and _numbers_tokens(value, tokens):
                raise _unknown(name)
            continue
        constant = isinstance(value, Tensor) and value.shape == tokens.shape and not value.diff(dim=-1).any()
        if _num_entries(value) > len(tokens) + int("cu" in name) and not constant:
            raise _unknown(name)


def _numbers_tokens(value: object, tokens: Tensor) -> bool:
    """Whether each token has a number that rises now and then, or -1 for padding, as documents are numbered; or one
    more than the token before it, and 0 now and then, as positions are.
    """
    if not isinstance(value, Tensor) or value.is_floating_point() or value.numel() != tokens.numel():
        return False
    numbers = value.reshape(tokens.shape).long()
    steps = numbers.diff(dim=-1)
    rises = (steps >= 0) | (numbers[:, 1:] == -1)
    restarts = (steps == 1) | (numbers[:, 1:] == 0)
    is_numbered = bool(rises.all() and (steps > 0).any())
    return (is_numbered or bool(restarts.all() and (numbers > 1).any())) and bool((steps != 1).any())


def _num_entries(value: object) -> float:
    if isinstance(value, list | tuple):
        return sum(map(_num_entries, value))
    return value.numel() if isinstance(value, Tensor) else 1 if isinstance(value, int | float | str) else math.inf


def _unknown(name: str) -> ConfigError:
    return ConfigError(
        f"the batch marks packed rows by {name}, which train_head does not know: mark documents by position_ids that "
        "restart, a numbered attention_mask, cu_seq_lens_q or seq_idx"
    )


def _from_positions(name: str, value: object, tokens: Tensor) -> tuple[Tensor, Tensor]:
    positions = _tensor(name, value)
    positions = positions[0] if positions.ndim == 3 else positions  # time, height, width: the same for text
    positions = positions[None] if positions.ndim == 1 else positions
    if positions.shape[-1] != tokens.shape[-1]:
        raise _misfit(name, positions, tokens)
    jumps = positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1  # as transformers detects packed rows
    return jumps.expand_as(tokens), torch.zeros_like(tokens, dtype=torch.bool)


def _from_numbers(name: str, value: object, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """A number for each document; an attention mask has 0 where there is none."""
    numbers = _tensor(name, value)
    if name == "attention_mask" and numbers.ndim == 4:
        return _from_mask(numbers, tokens)
    numbers = numbers[None] if numbers.ndim == 1 else numbers
    if numbers.shape != tokens.shape:
        raise _misfit(name, numbers, tokens)
    changes = numbers.diff(dim=-1, prepend=numbers[:, :1]) != 0
    is_padding = numbers == 0 if name == "attention_mask" else torch.zeros_like(changes)
    # Padding is no document: what follows it is not cut off from what precedes it by that alone.
    starts = changes & ~is_padding & ~_behind_padding(numbers, is_padding)
    return starts, is_padding


def _behind_padding(numbers: Tensor, is_padding: Tensor) -> Tensor:
    """Positions right after padding that go on with the document before it."""
    index = torch.arange(numbers.shape[1], device=numbers.device).expand_as(numbers)
    last = torch.where(is_padding, -1, index).cummax(-1).values.roll(1, -1)
    last[:, 0] = -1
    before = numbers.gather(1, last.clamp_min(0))
    return (last < 0) | (before == numbers)


def _from_mask(mask: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """[B, 1, T, T], True or 0 where a token may attend: causal blocks, one for each document."""
    batch, length = tokens.shape
    if mask.shape[0] not in (1, batch) or mask.shape[2:] != (length, length):
        raise _misfit("attention_mask", mask, tokens)
    is_additive = mask.is_floating_point() and not bool((mask > 0).any())
    allowed = mask[:, 0] == 0 if is_additive else mask[:, 0] != 0
    allowed = allowed.expand(batch, length, length)
    is_padding = ~allowed.diagonal(dim1=1, dim2=2)
    starts = torch.zeros_like(is_padding)
    starts[:, 1:] = ~allowed.diagonal(offset=-1, dim1=1, dim2=2) & ~is_padding[:, 1:]
    documents = starts.cumsum(-1).masked_fill(is_padding, -1)
    blocks = (documents[:, :, None] == documents[:, None]) & ~is_padding[:, :, None]
    if not torch.equal(allowed, blocks.tril()):
        raise ConfigError(
            "attention_mask is 4-dimensional and not one causal block for each document: a head is trained on causal "
            "text only; give a mask [batch, tokens] that numbers the documents, 0 for padding"
        )
    return starts, is_padding


def _from_ends(name: str, value: object, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Read where each document begins in the flattened batch, and the end; what follows it is padding."""
    ends = [int(end) for end in _tensor(name, value).flatten().tolist()]
    if ends[:1] != [0] or any(end < start for start, end in pairwise(ends)) or ends[-1] > tokens.numel():
        raise ConfigError(
            f"{name} = {str(ends)[:100]} does not fit {tokens.numel()} tokens: expected 0, then each document's end"
        )
    starts = torch.zeros(tokens.numel() + 1, dtype=torch.bool, device=tokens.device)
    starts[torch.tensor(ends[1:], dtype=torch.long, device=tokens.device)] = True
    index = torch.arange(tokens.numel(), device=tokens.device)
    return starts[:-1].view_as(tokens), (index >= ends[-1]).view_as(tokens)


def _from_flat_lengths(name: str, value: object, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The lengths of the documents of a flattened batch, as Unsloth's collators give them."""
    lengths = _tensor(name, value).flatten().long()
    return _from_ends(name, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), tokens)


def _from_lengths(name: str, value: object, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The lengths of the documents of each row, as in TRL's packed data sets; what follows them is padding."""
    rows = value.tolist() if isinstance(value, Tensor) else value
    if not isinstance(rows, list) or len(rows) != len(tokens) or not all(isinstance(row, list) for row in rows):
        raise ConfigError(f"{name} is no list of lengths for each of the {len(tokens)} rows")
    starts, is_padding = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros_like(tokens, dtype=torch.bool)
    for index, lengths in enumerate(rows):
        total = sum(lengths)
        if min(lengths, default=0) < 0 or total > tokens.shape[1]:
            raise ConfigError(f"{name} has {total} tokens in row {index}, which has {tokens.shape[1]}")
        ends = torch.tensor(lengths, dtype=torch.long, device=tokens.device).cumsum(0)
        starts[index, ends[ends < tokens.shape[1]]] = True
        is_padding[index, total:] = True
    return starts, is_padding


_READERS: dict[str, Callable[[str, object, Tensor], tuple[Tensor, Tensor]]] = {
    "position_ids": _from_positions,
    "text_position_ids": _from_positions,  # ms-swift's, beside the positions of images
    "input_pos": _from_positions,  # torchtune's
    "attention_mask": _from_numbers,
    "seq_idx": _from_numbers,
    "seq_lengths": _from_lengths,
    "packed_seq_lengths": _from_flat_lengths,
    **dict.fromkeys((*_ENDS, *(name + _PADDED for name in _ENDS)), _from_ends),
}


def _tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        try:
            return torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{name} of the batch is {type(value).__name__}; expected a tensor") from error
    return value


def _misfit(name: str, value: Tensor, tokens: Tensor) -> ConfigError:
    return ConfigError(
        f"{name} is {tuple(value.shape)}; to train a head it must be {tuple(tokens.shape)}, like input_ids"
    )

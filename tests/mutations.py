"""Faults put into the package one at a time, each of which the named fast tests must find.

    python tests/mutations.py                 all of them: about half an hour of two cores
    python tests/mutations.py sampling.py     those whose file or tests have this text
    python tests/mutations.py --root FOLDER   those of another checkout, by its own tests

Prints a line for each and a total; ends with 1 if one survives. The faults go into a copy of `src`.
"""

import argparse
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 900  # seconds; a fault that makes tests hang is found
FOUND, SURVIVED, UNCLEAR = "found", "SURVIVED", "UNCLEAR"  # the last: no test ran, or none could be collected


class Mutation(NamedTuple):
    """One fault: text that occurs once in a file of src/nextn, what stands there instead, and who finds it."""

    file: str
    old: str
    new: str
    tests: str  # arguments of pytest, files relative to tests


LOSS, DISTILL, SAMPLING = "test_mtp_loss.py", "test_distillation.py", "test_sampling.py"
TEXTS = "test_rounds_decode.py -k 'plain or rejection'"
DISTRIBUTION = "test_rounds_decode.py::test_whole_decodes_follow_the_distribution test_sampling.py"
COUNTS = "test_teacher_forced.py::test_greedy_counts_are_the_decoders test_golden.py"
HEAD = "test_head.py test_families.py test_golden.py test_model.py"
COPIES, CHECK, DROPS = "test_copy_drafts.py", "test_self_check.py", "test_acceptance_drop.py"

READERS = "test_shared_kv_head.py -k 'transformers or sampled'"
MUTATIONS = [
    # Heads that read the trunk's keys, and depths that read the first run's: which position, which layer, how far back.
    Mutation("model/shared_kv_head.py", 'packing[0]) + int(self.family.trunk_kv == "token")', "packing[0])", READERS),
    Mutation("model/shared_kv_head.py", 'return window and window + int(self.family.trunk_kv == "token")', "return window", READERS),
    Mutation("model/shared_kv_head.py", "storing_layers(trunk, each.name)[-1]", "storing_layers(trunk, each.name)[0]", READERS),
    Mutation("model/shared_kv_head.py", "cache.rollback_to([length - 1 for length in cache.lengths])", "pass", READERS),
    Mutation("model/shared_kv_head.py", "return HeadStep(final_hidden, layers.next_projection(final_hidden))", "return HeadStep(final_hidden, layers.next_projection(states))", READERS),
    Mutation("model/trunk.py", "return logits if self.logit_cap is None else self.logit_cap * torch.tanh(logits / self.logit_cap)", "return logits", READERS),
    Mutation("cache/attention_layer.py", "        if self.is_frozen:\n            return self.keys", "        if False:\n            return self.keys", "test_head.py"),
    # Drafts copied from the text: where from, their probability, which of them the head has not seen.
    Mutation("speculative/copy_drafts.py", "self._latest[key] = place", "self._latest.setdefault(key, place)", COPIES),
    Mutation("speculative/copy_drafts.py", "index % period", "min(index, period - 1)", COPIES),
    Mutation("speculative/copy_choice.py", "sum(self.reach[:count])", "float(count)", COPIES),
    Mutation("speculative/copy_drafts.py", "min(num_draft_tokens, num_accepted + 1)", "num_draft_tokens", COPIES),
    Mutation("decoding/records.py", "q[row, torch.arange(len(copied)), list(copied)] = 1", "q[row, torch.arange(len(copied)), list(copied)] = 0.3", COPIES),
    Mutation("decoding/records.py", "                q[row] = 0\n", "", COPIES),
    Mutation("runtime/native/csrc/rounds.cpp", "probs[tokens[depth]] = 1;", "probs[tokens[depth]] = 0.3f;", COPIES),
    Mutation("runtime/native/csrc/rounds.cpp", "chain.limits[row] = num_copied(row) ? 0 : std::min", "chain.limits[row] = std::min", COPIES),
    # The self-check, and what a measurement says of an earlier one.
    Mutation("runtime/self_check.py", "if not error <= _MAX_ERROR_RATIO * own.get(size, 0.0):", "if error > 1:", CHECK),
    Mutation("runtime/self_check.py", "if not error <= tolerance}", "}", CHECK + " test_backend.py"),
    Mutation("evaluate/acceptance_drop.py", "drop.tested_at(FALSE_ALARMS / len(groups) / groups[is_length])", "drop.tested_at(0.025)", DROPS),
    Mutation("evaluate/acceptance_drop.py", "reached = min(1.0, share) * (self.ceiling - base)", "reached = self.ceiling - base", DROPS),
    Mutation("cache/attention_layer.py", "if (num_positions, device) not in made:", "if not made or (num_positions, device) not in made and len(made) > 9:", "test_kv_cache.py -k at_once"),
    # Labels, masks and weights of losses.
    Mutation("losses/mtp_loss.py", "self.tokens[:, depth + 1 :].where(", "self.tokens[:, depth:-1].where(", LOSS),
    Mutation("losses/mtp_loss.py", "valid = valid[:, depth + 1 :]", "valid = valid[:, depth:-1]", LOSS),
    Mutation("losses/mtp_loss.py", "run = torch.nn.functional.pad(breaks.cumsum(1), (1, 0))", "run = self.documents", LOSS),
    Mutation("losses/mtp_loss.py", "lam / depths * share", "lam * share", LOSS),
    Mutation("losses/mtp_loss.py", 'return counts if denominator == "valid" else trunk', "return counts", LOSS),
    Mutation("losses/mtp_loss.py", "beta**k for", "beta ** -k for", LOSS),
    Mutation("train/config.py", "bisect_right(self.starts, tokens) - 1", "bisect_right(self.starts, tokens - 1) - 1", LOSS),
    # Distillation.
    Mutation("losses/distillation.py", "group.positions + group.depths + 1,", "group.positions + group.depths,", DISTILL),
    Mutation("losses/distillation.py", "(1, 0), value=1.0)", "(1, 0), value=0.0)", DISTILL),
    Mutation("losses/divergences.py", "return value, overlap, tile.q.sub_(tile.probs.p)", "return value, overlap, tile.q", DISTILL),
    Mutation("losses/divergences.py", "tile.q.mul_(share).sub_(below)", "tile.q.mul_(share).add_(below)", DISTILL),
    Mutation("losses/divergences.py", "if gradient is not None and temperature != 1", "if gradient is not None and temperature == 1", DISTILL),
    # The acceptance rule, and the distribution after it.
    Mutation("speculative/verification.py", "is_accepted = u * q.gather(-1, index)[..., 0] < p[:, :-1].gather(-1, index)[..., 0]", "is_accepted = u * p[:, :-1].gather(-1, index)[..., 0] < q.gather(-1, index)[..., 0]", SAMPLING),
    Mutation("speculative/verification.py", "residual = (scaled - q[row, num_accepted.clamp_max(num_draft_tokens - 1)]).clamp_min(0)", "residual = scaled", SAMPLING),
    Mutation("speculative/verification.py", "is_rejected = num_accepted < (", "is_rejected = num_accepted <= (", SAMPLING),
    Mutation("speculative/verification.py", "weights[-1] * p_draft[:, depth] / q_draft", "p_draft[:, depth] / q_draft", SAMPLING),
    Mutation("speculative/verification.py", "num_accepted = (is_accepted * depth).amax(-1)", "num_accepted = _leading(is_accepted, limit)", SAMPLING),
    Mutation("speculative/verification.py", "u.gather(1, limit[:, None])[:, 0]", "u[:, 0]", DISTRIBUTION),
    Mutation("speculative/verification.py", "return num_accepted, best[num_accepted]", "return num_accepted, best[num_accepted - 1]", SAMPLING),
    # Processors.
    Mutation("speculative/sampling.py", "torch.where(scores < 0, scores * penalty", "torch.where(scores > 0, scores * penalty", SAMPLING),
    Mutation("speculative/sampling.py", "scores < scores.topk(sampling.top_k)", "scores <= scores.topk(sampling.top_k)", SAMPLING),
    Mutation("speculative/sampling.py", "F.pad(weights.cumsum(-1)[..., :-1], (1, 0))", "weights.cumsum(-1)", SAMPLING),
    Mutation("speculative/sampling.py", "sampling.min_p * probs.amax(-1, keepdim=True)", "sampling.min_p", SAMPLING),
    Mutation("speculative/sampling.py", "scores = scores / sampling.temperature", "scores = scores * sampling.temperature", SAMPLING),
    Mutation("speculative/sampling.py", "upto = torch.minimum(step[:, None], step)", "upto = torch.maximum(step[:, None], step)", SAMPLING),
    Mutation("speculative/sampling.py", "return (cdf > target)", "return (cdf >= target)", SAMPLING),
    # The head: alignment, norms, order of inputs, which state, recycling.
    Mutation("model/head.py", 'if self.family.concat == "hidden_first"', 'if self.family.concat != "hidden_first"', HEAD),
    Mutation("model/head.py", "self.token_norm(embedded), self.hidden_norm(hidden)", "self.token_norm(embedded), hidden", HEAD),
    Mutation("model/head.py", "final_hidden = self.final_norm(hidden)", "final_hidden = hidden", HEAD),
    Mutation("model/head.py", 'if self.family.next_hidden == "post" else raw', 'if self.family.next_hidden != "post" else raw', HEAD),
    Mutation("model/head.py", "(positions == 0)[..., None]", "(positions < 0)[..., None]", HEAD),
    Mutation("model/head.py", "return min(depth, self.num_modules) - 1", "return (depth - 1) % self.num_modules", HEAD),
    Mutation("model/head.py", 'return depth > (self.num_modules if self.family.order == "unchained" else 1)', "return depth > self.num_modules", HEAD),
    Mutation("model/head.py", "self.embedding = nn.Embedding(trunk.vocab_size, size", "self.other = nn.Embedding(trunk.vocab_size, size", "test_model.py test_families.py"),
    # Drafting: prefill, refresh, rollback.
    Mutation("decoding/drafter.py", "start = self._start(row) + depth", "start = self._start(row) + depth - 1", COUNTS),
    Mutation("decoding/drafter.py", "run=self.contract.prefill)", "run=False)", COUNTS),
    Mutation("decoding/drafter.py", "cache.rollback_to(lengths)", "cache.rollback_to(list(cache.lengths))", COUNTS),
    Mutation("decoding/drafter.py", "0 if refresh or num_modules > 1 else", "0 if num_modules > 1 else", COUNTS),
    Mutation("decoding/drafter.py", "[max(0, final - num_modules + 1) if num_steps >= num_modules else 0", "[final if num_steps >= num_modules else 0", COUNTS + " test_rounds.py test_batch.py"),
    Mutation("decoding/drafter.py", "len(row) - last - self._start(index)", "len(row) - self._start(index)", COUNTS),
    Mutation("decoding/drafter.py", "torch.cat([self.pending[row], states[0 if skip is None", "torch.cat([states[0 if skip is None", COUNTS),
    # Caches and what a round commits.
    Mutation("cache/kv_cache.py", "self.lengths = [length + count for", "self.lengths = [length + max(counts) + 0 * count for", TEXTS),
    Mutation("cache/attention_layer.py", "buffer[seq, :, start : start + states.shape[2]] = states[seq]", "buffer[seq, :, starts[0] : starts[0] + states.shape[2]] = states[seq]", TEXTS),
    Mutation("cache/attention_layer.py", "self.keys, self.values = self.keys[sequences], self.values[sequences]", "self.keys = self.keys[sequences]", TEXTS),
    Mutation("cache/kv_cache.py", "        self.lengths = list(lengths)\n", "        self.lengths = [length + 1 for length in lengths]\n", COUNTS),
    Mutation("cache/recurrent.py", "sorted({count for count in counts if count < num_positions})", "sorted({count for count in counts if 1 < count < num_positions})", TEXTS),
    Mutation("cache/recurrent.py", "return value[sequences, :count]", "return value[sequences, : count + 1]", TEXTS),
    Mutation("cache/recurrent.py", "states[index] = None if state is None else state[sequences]", "states[index] = state", "test_kv_cache.py test_scheduler.py test_hybrid.py test_batch.py test_rounds_decode.py"),
    Mutation("decoding/torch_rounds.py", "num_committed = [count + 1 for count in num_accepted]", "num_committed = [max(1, count) for count in num_accepted]", TEXTS),
    Mutation("decoding/batch.py", "states[max(0, count - size) : count].clone()", "states[max(0, count - size - 1) : max(0, count - 1)].clone()", "test_scheduler.py -k prefixes"),
    Mutation("decoding/torch_rounds.py", "min(limit, sequence.remaining - 1)", "min(limit, sequence.remaining)", "test_rounds_decode.py test_batch.py"),
    Mutation("decoding/batch.py", "[num_positions - len(tail) for tail in tails]", "[num_positions for tail in tails]", "test_scheduler.py -k prefixes"),
    Mutation("speculative/draft_policy.py", "self.ended = not is_taken or self.survival < plan.go[self.num_draft_tokens]", "self.ended = not is_taken", "test_draft_policy.py test_draft_chain.py"),
    Mutation("speculative/draft_policy.py", "for index in bins[:num_accepted]:", "for index in bins:", "test_draft_policy.py"),
    # Counters, statistics, diagnosis.
    Mutation("stats/acceptance.py", "len(part.drafts) > k and part.num_accepted >= k", "len(part.drafts) > k", "test_stats.py"),
    Mutation("stats/acceptance.py", "        survival *= rate\n", "        survival = rate\n", "test_stats.py"),
    Mutation("stats/intervals.py", "z * z / num_drafted", "z / num_drafted", "test_stats.py"),
    Mutation("stats/intervals.py", "design_effect = max(1.0, ", "design_effect = min(1.0, ", "test_stats.py"),
    Mutation("stats/intervals.py", "math.sqrt(spread * len(gaps) / (len(gaps) - 1)) / total", "math.sqrt(spread / len(gaps)) / total", "test_stats.py"),
    Mutation("stats/speedup.py", "self.v[k] + k * self.c", "self.v[k] + self.c", "test_stats.py"),
    Mutation("evaluate/likelihoods.py", "min(1.0, len(causes) * min(cause.p_value for cause in causes))", "min(cause.p_value for cause in causes)", "test_likelihoods.py"),
    Mutation("evaluate/likelihoods.py", "choose = math.lgamma(drafted + 1) - math.lgamma(accepted + 1)", "choose = math.lgamma(drafted + 1) + math.lgamma(accepted + 1)", "test_likelihoods.py"),
    Mutation("engines/counters.py", "return counters.per_position[depth - 1]", "return counters.num_drafts or 0", "test_counters.py"),
    Mutation("engines/counters.py", "draft_tokens=_difference(self.draft_tokens, before.draft_tokens)", "draft_tokens=self.draft_tokens", "test_counters.py"),
    # Processes.
    Mutation("train/distributed.py", "torch.stack(parts, dim=1).flatten()", "torch.cat(parts)", "test_distributed.py -k frozen"),
    Mutation("train/distributed.py", "batch_size % (self.world * parts)", "batch_size % self.world", "test_distributed.py"),
    Mutation("train/distributed.py", "shard_like(deferred.take(value), part)", "shard_like(deferred.take(value) * 2, part)", "test_distributed.py -k fresh_head"),
    # Checkpoints: what is loaded, quantized weights, edits, audit.
    Mutation("model/load_head.py", "        yield from self._missing()\n", "", "test_load_head.py"),
    Mutation("model/load_head.py", "for extra in self.unexpected:", "for extra in ():", "test_load_head.py"),
    Mutation("checkpoint/quantized_weights.py", "scale.repeat_interleave(block[0], dim=-2)", "scale.repeat_interleave(block[1], dim=-2)", "test_quantized_weights.py test_stored_codes.py"),
    Mutation("checkpoint/quantized_weights.py", "torch.arange(weight.shape[1]) // self.group_size", "torch.arange(weight.shape[1]) // (self.group_size + 1)", "test_quantized_weights.py"),
    Mutation("checkpoint/quantized_weights.py", "return 1 << self.bits - 1", "return (1 << self.bits - 1) - 1", "test_quantized_weights.py"),
    Mutation("checkpoint/gguf_blocks.py", "torch.stack((runs & 15, runs >> 4)", "torch.stack((runs >> 4, runs & 15)", "test_gguf_import.py test_stored_blocks.py"),
    Mutation("checkpoint/gguf_blocks.py", "groups.sub_(_of_groups(self.min_scales, self.group_mins))", "groups.sub_(_of_groups(self.scales, self.group_mins))", "test_gguf_import.py test_stored_blocks.py"),
    Mutation("edit/restore.py", "gone = _replaced(dst, src, force=force)", "gone = set()", "test_restore.py"),
    Mutation("edit/restore.py", "if not force and src_parts <= dst_parts", "if not force and src_parts < dst_parts", "test_restore.py"),
    Mutation("edit/restore.py", "count = len(src.modules)", "count = dst.declared", "test_restore.py"),
    Mutation("edit/convert.py", "_refuse_different(head.family, layout, norm_weight, len(head.modules))", "()", "test_convert.py"),
    Mutation("audit_rules/norm_weights.py", "for offset in (2, 1):", "for offset in (1,):", "test_audit_values.py"),
    Mutation("audit_rules/shapes.py", '{"projection": [hidden, 2 * hidden]}', '{"projection": [2 * hidden, hidden]}', "test_audit_shapes.py test_audit.py"),
    Mutation("audit_rules/shapes.py", "if last >= count", "if last > count", "test_audit_shapes.py test_audit.py"),
    # The server's limits.
    Mutation("serve/http_limits.py", "            if size > self._options.max_body_bytes", "            if False", "test_serve_limits.py"),
    Mutation("serve/http_limits.py", "if len(headers) > limits.max_headers or size", "if len(headers) > limits.max_headers and size", "test_serve_limits.py"),
    Mutation("serve/http_limits.py", "host.lower() not in allowed", "host not in allowed", "test_serve_limits.py"),
    Mutation("serve/http_limits.py", "self.loop.call_later(self.limits.stall_s, self.transport.abort)", "self.loop.call_later(1000, self.transport.abort)", "test_serve_limits.py"),
    Mutation("serve/http_limits.py", 'key if scheme.lower() == b"bearer" else b""', "key", "test_serve_limits.py"),
    # What agents speak.
    Mutation("serve/scheduler.py", "is not None and not sequence.request.prompt_logprobs:", "is not None:", "test_serve_api.py"),
    Mutation("serve/request_model.py", "cls.path is None or name in cls.meaningful", "cls.path is None", "test_serve_api.py test_serve_errors.py"),
    Mutation("serve/answer_blocks.py", "block.is_complete = call.is_last", "block.is_complete = True", "test_serve_responses.py"),
    Mutation("serve/anthropic_messages.py", "len(self._request.prompt) - choice.cached_tokens", "len(self._request.prompt)", "test_serve_messages.py"),
    Mutation("serve/openai_responses.py", "or self._num_chars > _MAX_STORED_CHARS", "", "test_serve_responses.py"),
    # The native runtime; those of csrc compile it.
    Mutation("runtime/native/graph_analysis.py", "return all(start <= index < end for", "return True or all(start <= index < end for", "test_fusion.py test_norm_fusion.py test_session.py"),
    Mutation("runtime/native/session.py", "if not self.read_layers:  # whose chain", "if True:  # whose chain", "test_shared_kv_head.py -k native"),
    Mutation("runtime/native/session.py", "offset=-1 if self.read_layers else 0", "offset=0", "test_shared_kv_head.py -k native"),
    Mutation("runtime/native/session.py", "replace(each, window=head.visible_window(each))", "replace(each, window=head.windows[each])", "test_shared_kv_head.py -k native"),
    Mutation("runtime/native/program.py", "if block[2] >= first)", "if block[2] > first)", "test_session.py test_program.py"),
    Mutation("runtime/native/csrc/rounds.cpp", "pending->counts[row] += num_new;", "pending->counts[row] += num_accepted;", "test_session.py test_rounds.py"),
    Mutation("runtime/native/csrc/sampling.cpp", "tail->first / float(total)", "tail->first", "test_native_sampling.py"),
    Mutation("runtime/native/csrc/chain.cpp", "const bool taken = survival >= chain.take[depth];", "const bool taken = survival > 0;", "test_draft_chain.py test_rounds.py"),
    Mutation("runtime/native/csrc/norm.cpp", "store(sum, both), store(row, both);", "store(sum, both), store(row, load(a));", "test_norm_fusion.py test_session.py"),
    Mutation("runtime/native/precision.py", "wide = (wide - others) & dynamic", "wide = wide & others", "test_precision.py"),
    Mutation("model/logits.py", "rows, size = rows.float(), max", "rows, size = rows.bfloat16().float(), max", "test_trunk.py"),
]  # fmt: skip


def problems(root: Path) -> Iterator[str]:
    """Yield the mutations that do not apply to a checkout."""
    for each in MUTATIONS:
        path = root / "src" / "nextn" / each.file
        count = path.read_text().count(each.old) if path.is_file() else 0
        if count != 1 or each.old == each.new:
            yield f"{each.file}: {each.old!r} occurs {count} times, not once"
        for word in shlex.split(each.tests):
            if word.startswith("test_") and not (root / "tests" / word.partition("::")[0]).is_file():
                yield f"{each.file}: no tests/{word}"


def run_tests(package: Path, root: Path, tests: str, libraries: Path | None) -> int:
    """Run the fast tests in a fork of this process, which has imported what they need -> pytest's exit status."""
    child = os.fork()
    if child:
        return _wait(child)
    try:
        os.setsid()
        os.chdir(root)
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 1), os.dup2(devnull, 2)
        os.environ["PYTHONPATH"] = str(package)
        if libraries is not None:
            os.environ["TORCH_EXTENSIONS_DIR"] = str(libraries)
        sys.path.insert(0, str(package))
        import pytest

        import nextn

        assert Path(nextn.__file__).is_relative_to(package)
        words = [f"tests/{word}" if word.startswith("test_") else word for word in shlex.split(tests)]
        status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "not more and not slow", *words])
    except BaseException:
        status = 99
    os._exit(int(status))


def _wait(child: int) -> int:
    """The exit status of a child, which is ended after TIMEOUT with 1, as a test that fails."""
    end = time.monotonic() + TIMEOUT
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1
        time.sleep(0.1)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 1


def judge(mutation: Mutation, package: Path, root: Path, number: int) -> str:
    """Apply one mutation to the copy of the package, run its tests, and put the text back."""
    path = package / "nextn" / mutation.file
    text = path.read_text()
    try:
        path.write_text(text.replace(mutation.old, mutation.new))
        os.utime(path, (2 * number, 2 * number))  # another time for each text, so that byte code is not stale
        libraries = package.parent / "libraries" if path.suffix == ".cpp" else None  # not among the user's
        status = run_tests(package, root, mutation.tests, libraries)
    finally:
        path.write_text(text)
        os.utime(path, (2 * number + 1, 2 * number + 1))
    return {0: SURVIVED, 1: FOUND}.get(status, UNCLEAR)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only mutations whose file or tests have one of these texts")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to mutate, with its own tests")
    given = parser.parse_args()
    root = given.root.resolve()
    if wrong := [*problems(root)]:
        print(*wrong, sep="\n")
        return 2
    chosen = [each for each in MUTATIONS if not given.words or any(w in each.file + each.tests for w in given.words)]
    import torch
    import transformers.modeling_utils  # noqa: F401  # once, not in each fork

    torch.set_num_threads(1)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "src"
        shutil.copytree(root / "src", package, ignore=shutil.ignore_patterns("__pycache__"))
        for number, each in enumerate(chosen):
            started = time.monotonic()
            results.append(judge(each, package, root, number))
            first, new = each.old.strip().splitlines()[0], each.new.strip() or "nothing"
            print(f"{results[-1]:8} {time.monotonic() - started:5.0f} s  {each.file}: {first} -> {new}", flush=True)
    print(*(f"{results.count(kind)} {kind.lower()}" for kind in (FOUND, SURVIVED, UNCLEAR)), sep=", ")
    return int(results.count(FOUND) < len(results))


if __name__ == "__main__":
    sys.exit(main())

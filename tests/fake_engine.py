"""An OpenAI-compatible server on the loopback over a toy distribution, which breaks what a test names. Knows no nextn.

The probs: 40 characters; the logits of the next one are a row of a fixed table, chosen by the last three. Greedy texts,
samples and log-probabilities are those of the distribution, so what a correct engine would answer is known.
"""

import json
import threading
import time

import loopback
import numpy as np
import pytest

LETTERS = "abcdefghijklmnopqrstuvwxyz ,.;:-0123456789"
NUM = len(LETTERS)
ROWS = 4096
ROUND = 3  # characters a round: every third is the trunk's own, the others are drafts
_LOGITS = np.random.default_rng(7).normal(0, 2.0, (ROWS, NUM))
_ORDER = _LOGITS.argsort(axis=1)
# In one row of eight, two letters are level but for a rounding error.
_TIED = np.arange(0, ROWS, 8)
_LOGITS[_TIED, _ORDER[_TIED, -2]] = _LOGITS[_TIED, _ORDER[_TIED, -1]] - 0.004


def ids_of(text):
    return [LETTERS.find(char) if char in LETTERS else ord(char) % NUM for char in text]


def row_of(context):
    row = 0
    for token in context[-3:]:
        row = (row * 61 + token + 1) % ROWS
    return row


def log_softmax(logits):
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


class FakeEngine(loopback.Loopback):
    """faults: names of what it breaks; see `Handler`. drafts: whether it has counters of drafts, and they move."""

    def __init__(self, *faults, drafts=True, model="toy", context=600):
        self.faults, self.drafts, self.model, self.context = set(faults), drafts, model, context
        self.seen, self.running, self.num, self.requests = [], [], 0, []
        self.drafted, self.num_accepted, self.hits, self.num_asked = 0, 0, 0, 0
        self.lock = threading.Lock()
        self.listen(Handler, engine=self)

    def decode(self, prompt, body, *, neighbor=None, stale=False):
        """-> letters, their log-probability, the whole distribution at each place."""
        rng = np.random.default_rng(body.get("seed"))
        temperature, out, distributions = body.get("temperature", 1.0), [], []
        stops = [ids_of(stop) for stop in body.get("stop", [])]
        for place in range(body["max_tokens"] + ("one-more" in self.faults)):
            context = [*prompt, *out]
            if neighbor is not None and place % 4 == 2:
                context = [*neighbor, *out]
            if stale and place < 2:
                context = [*context[:-1], (context[-1] + 1) % NUM]
            drafted = place % ROUND != 0
            out.append(
                self.choose(
                    row_of(context),
                    temperature,
                    rng,
                    drafted=drafted,
                    distributions=distributions,
                    long=3 * len(prompt) > 2 * self.context,
                )
            )
            if any(out[-len(stop) :] == stop for stop in stops):
                return out, distributions, "stop"
        return out, distributions, "length"

    def choose(self, row, temperature, rng, *, drafted, distributions, long):
        logits = _LOGITS[row]
        if "rounding" in self.faults:  # as another kernel would: only the level ones change places
            logits = logits + np.where(np.arange(NUM) == logits.argmax(), -0.01, 0.0)
        probs = log_softmax(logits)
        distributions.append(probs)
        if temperature == 0:
            wrong = drafted and ("wrong" in self.faults or (long and "wrong-when-long" in self.faults))
            return int(logits.argsort()[-4 if wrong and row % 5 == 0 else -1])
        sharp = "sharp" in self.faults or (drafted and "sharp-drafts" in self.faults)
        ignored = "hot" in self.faults or (drafted and "hot-drafts" in self.faults)
        used = 1 if ignored else 0.5 if drafted and "warm-drafts" in self.faults and temperature < 0.5 else temperature
        chances = np.exp(probs * (2 if sharp else 1) / used)
        if drafted and "garbage-drafts" in self.faults and rng.random() < 0.15:
            chances = np.ones(NUM)
        return int(rng.choice(NUM, p=chances / chances.sum()))

    def cached(self, prompt):
        """How much of a prompt was seen before, in blocks of 16; less than all of it."""
        best = 0
        for other in self.seen:
            same = next(
                (n for n, (a, b) in enumerate(zip(prompt, other, strict=False)) if a != b),
                min(map(len, (prompt, other))),
            )
            best = max(best, same)
        return min(best, len(prompt) - 1) // 16 * 16

    def count(self, num):
        """Rounds of ROUND - 1 drafts: three of four keep all, the fourth none."""
        if self.drafts and "off" not in self.faults:
            with self.lock:
                rounds = max(1, num // ROUND)
                self.drafted += 4 * rounds
                self.num_accepted += 0 if "all-rejected" in self.faults else 3 * rounds

    def metrics(self):
        drafted, kept = self.drafted, self.num_accepted
        if "reset" in self.faults and self.num > 30:
            drafted, kept = 4, 3
        lines = ["# TYPE vllm:spec_decode_num_drafts counter"]
        label = f'engine="0",model_name="{self.model}"'
        if self.drafts:
            lines += [
                f"vllm:spec_decode_num_drafts_total{{{label}}} {drafted}.0",
                f"vllm:spec_decode_num_draft_tokens_total{{{label}}} {2 * drafted}.0",
                f"vllm:spec_decode_num_accepted_tokens_total{{{label}}} {2 * kept}.0",
                *(
                    f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label},position="{p}"}} {kept}'
                    for p in (0, 1)
                ),
            ]
        return "\n".join([*lines, f"vllm:prefix_cache_hits_total{{{label}}} {self.hits}", ""])


class Handler(loopback.Handler):
    engine: FakeEngine

    def do_GET(self):
        engine = self.engine
        if "html" in engine.faults:
            self.give(200, b"<!DOCTYPE html><html><title>Log in, please</title></html>", kind="text/html")
        elif "foreign" in engine.faults:
            self.give_json({"hello": ["world"]})
        elif self.path == "/v1/models":
            names = ["one", "two"] if "two-models" in engine.faults else [engine.model]
            names = [] if "no-models" in engine.faults else names
            self.give_json({"data": [{"id": name, "max_model_len": engine.context} for name in names]})
        elif self.path == "/health" and "measuring" in engine.faults:  # as nextn serve says it, for two questions
            engine.num_asked += 1
            self.give_json({"is_measuring": engine.num_asked <= 2})
        elif self.path == "/metrics" and "no-metrics" not in engine.faults:
            self.give(200, engine.metrics().encode(), kind="text/plain")
        else:
            self.give_json({"detail": "Not Found"}, status=404)

    def do_POST(self):
        engine = self.engine
        body = self.read_json()
        with engine.lock:
            engine.num += 1
            engine.requests.append((self.path, body, self.headers.get("Authorization")))
        trick = next((each for each in engine.faults if each.startswith("http-")), None)
        if trick and engine.num > 1:
            self.fail(int(trick[5:8]), message=trick[9:] or "it broke")
        elif "busy-once" in engine.faults and engine.num == 2:
            self.fail(503, {"Retry-After": "0"})
        elif "key" in engine.faults and self.headers.get("Authorization") != "Bearer secret-key":
            self.give_json({"error": {"message": f"bad key {self.headers.get('Authorization')}"}}, status=401)
        elif "hang" in engine.faults and engine.num > 1:
            time.sleep(30)
        elif "drip" in engine.faults and engine.num > 1:
            self.drip()
        elif "huge" in engine.faults and engine.num > 1:
            self.give(200, b'{"choices": "' + b"x" * 4_000_000 + b'"}')
        elif "drop" in engine.faults and engine.num > 1:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choi')
            self.close_connection = True
        elif self.path == "/tokenize" and "no-ids" not in engine.faults:
            self.give_json({"tokens": ids_of(body["prompt"])})
        elif self.path in ("/v1/completions", "/v1/chat/completions"):
            self.complete(body, chat="chat" in self.path)
        else:
            self.give_json({"error": {"message": "no such route"}}, status=404)

    def complete(self, body, *, chat):
        engine = self.engine
        if "strict" in engine.faults and "top_k" in body:
            return self.give_json({"error": {"message": "unrecognized request argument: top_k"}}, status=400)
        if "no-tokenizer" in engine.faults and (chat or isinstance(body["prompt"], str)):
            return self.give_json({"error": {"message": "no tokenizer"}}, status=400)
        if "no-chat" in engine.faults and chat:
            return self.give_json({"error": {"message": "no chat template"}}, status=400)
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        prompt = ids_of(prompt) if isinstance(prompt, str) else prompt
        if len(prompt) + body["max_tokens"] > engine.context:
            return self.give_json({"error": {"message": "longer than the context"}}, status=400)
        if "tools" in body or "response_format" in body:
            return self.formed(body, chat=chat)
        with engine.lock:
            engine.running.append(prompt)
            cached = 0 if "cache_salt" in body or "no-cache" in engine.faults else engine.cached(prompt)
            engine.seen = [*engine.seen[-200:], prompt]
            engine.hits += cached
        neighbor = None
        if "mixed" in engine.faults:
            time.sleep(0.02)
            neighbor = next((other for other in engine.running if other != prompt), None)
        stale = cached > 64 and "stale-cache" in engine.faults
        out, distributions, finish = engine.decode(prompt, body, neighbor=neighbor, stale=stale)
        if "swapped" in engine.faults and neighbor is not None:
            out, distributions, finish = engine.decode(neighbor, body)
        with engine.lock:
            engine.running.remove(prompt)
        engine.count(len(out))
        self.answer(body, prompt, out, distributions, finish, cached, chat=chat)

    def answer(self, body, prompt, out, distributions, finish, cached, *, chat):
        engine, num = self.engine, len(out)
        text = "".join(LETTERS[token % NUM] for token in out)
        if finish == "stop" and "stop-leak" not in engine.faults:
            text = min((text.split(stop)[0] for stop in body["stop"]), key=len)
        if "stop-late" in engine.faults and finish == "stop":
            text += LETTERS[out[-4]] + "z"
        if body.get("stream"):
            return self.stream(text, finish, chat=chat)
        if "finish" in engine.faults:
            finish = "done"
        choice = {"index": 0, "finish_reason": finish}
        choice |= {"message": {"content": text}} if chat else {"text": text}
        if body.get("return_token_ids") and "no-ids" not in engine.faults:
            choice |= {"token_ids": out, "prompt_token_ids": prompt}
        if body.get("logprobs") and "no-logprobs" not in engine.faults:
            choice |= {"logprobs": self.logprobs(body, out, distributions, chat=chat)}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": num}
        if "hits-untold" not in engine.faults:
            usage |= {"prompt_tokens_details": {"cached_tokens": cached}}
        self.give_json({"choices": [choice], "usage": usage})

    def logprobs(self, body, out, distributions, *, chat):
        faults = self.engine.faults
        if "other-logprobs" in faults:
            distributions = [*distributions[1:], distributions[0]]
        if "flat-logprobs" in faults:
            distributions = [log_softmax(probs * 0.7) for probs in distributions]
        as_ids = body.get("return_tokens_as_token_ids") and "no-ids" not in faults

        def name(token):
            return f"token_id:{token}" if as_ids else LETTERS[token]

        rows = []
        for token, probs in zip(out, distributions, strict=True):
            best = [int(each) for each in probs.argsort()[::-1][:5]]
            mine = 0.0 if "zero-logprobs" in faults else float(probs[token])
            mine += 0.5 * ("two-numbers" in faults and mine < -0.6)
            reported = {name(each): float(probs[each]) for each in best}
            if "untold-drafts" in faults and len(rows) % ROUND:  # as llama.cpp's server does
                mine, reported = 0.0, {}
            rows.append((name(token), mine, reported))
        if chat:
            return {"content": [
                {"token": text, "logprob": mine,
                 "top_logprobs": [{"token": each, "logprob": value} for each, value in best.items()]}
                for text, mine, best in rows
            ]}  # fmt: skip
        texts, mine, best = zip(*rows, strict=True)
        return {"tokens": list(texts), "token_logprobs": list(mine), "top_logprobs": list(best)}

    def stream(self, text, finish, *, chat):
        pieces = [text[start : start + ROUND] for start in range(0, len(text), ROUND)]
        if "stream-loses" in self.engine.faults and len(pieces) > 2:
            del pieces[2]
        if "stream-loses-once" in self.engine.faults:
            self.engine.faults.remove("stream-loses-once")
            del pieces[2]
        events = [{"choices": [{"delta": {"content": piece}} if chat else {"text": piece}]} for piece in pieces]
        events += [{"choices": [{"delta": {}, "text": "", "finish_reason": finish}]}, {"choices": [], "usage": {}}]
        data = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        if "stream-breaks" not in self.engine.faults:
            data += "data: [DONE]\n\n"
        self.give(200, data.encode(), kind="text/event-stream")

    def formed(self, body, *, chat):
        faults = self.engine.faults
        if "no-forms" in faults:
            return self.give_json({"error": {"message": "guided decoding is not supported"}}, status=400)
        person = '{"name": "Ada", "age": 36, "color": "red", "member": true}'
        call = '{"city": "Lisbon", "unit": "celsius"}'
        hot = body.get("temperature", 0) > 0  # what breaks is rare: greedy text is right
        if hot and "broken-json" in faults:
            person, call = person.replace('"red"', '"red" "red"'), call[:-3]
        if hot and "misfit" in faults:
            person, call = person.replace("36", '"36"'), call.replace("celsius", "kelvin")
        is_cut = "cut" in faults or ("wordy" in faults and body["max_tokens"] < 300)
        if is_cut:
            person = person[:20]
        choice = {"finish_reason": "length" if is_cut else "stop", "message": {"content": person}}
        if "tools" in body:
            named = {"function": {"name": "weather", "arguments": call}}
            choice["message"] = {"content": None, "tool_calls": [named]}
        if "ignores-forms" in faults:
            choice["message"] = {"content": "Ada is 36 years old."}
        if not chat:
            choice = {"finish_reason": choice["finish_reason"], "text": choice["message"]["content"]}
        self.give_json({"choices": [choice], "usage": {}})

    def drip(self):
        """A byte now and then, for longer than anyone waits."""
        self.send_response(200)
        self.send_header("Content-Length", "100000")
        self.end_headers()
        for _ in range(200):
            try:
                self.wfile.write(b" ")
                self.wfile.flush()
            except OSError:
                return
            time.sleep(0.05)

    def fail(self, status, headers=(), message="it broke"):
        self.give(status, json.dumps({"error": {"message": message}}).encode(), headers=dict(headers))

    def give_json(self, found, status=200):
        self.give(status, json.dumps(found).encode())


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    """Neither a key nor a proxy of the user's."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # it must not be asked for loopback

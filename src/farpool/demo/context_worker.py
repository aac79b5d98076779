"""Process that answers questions over a long context. It computes the context's KV and saves it, or it loads the KV.

It reads a `ContextRequest` from stdin and writes a `ContextReply` to stdout.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import msgspec
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from farpool.decoding import prepared
from farpool.demo.shared_context import BLOCK_TOKENS, Answer, ContextReply, ContextRequest
from farpool.kv.cache import PrefixCache
from farpool.kv.engines.transformers_config import cache_argument
from farpool.kv.memory import Layer, TensorMemory

_CONFIG: dict[str, Any] = {
    "vocab_size": 256,  # a token is a byte of text
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1 << 16,
}


class _Answerer:
    """Answers questions with the model. It has a prefix cache, which keeps KV on a node."""

    def __init__(self, node: str) -> None:
        torch.manual_seed(0)
        self.config: Any = LlamaConfig(**_CONFIG)
        model: Any = LlamaForCausalLM(self.config)
        self.model = model.eval()
        self.cache_argument = cache_argument(model)
        self.width: int = _CONFIG["hidden_size"] // _CONFIG["num_attention_heads"]
        layer = Layer(2 * _CONFIG["num_key_value_heads"] * self.width * 4)
        self.cache = PrefixCache(
            [node],
            [layer] * _CONFIG["num_hidden_layers"],
            model="demo",
            weights_id="seed 0",
            dtype="float32",
            layout="heads-first",
            block=BLOCK_TOKENS,
            hold_out=False,
            timeout=10,
        )

    def room(self, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Allocate memory for the keys and values of `tokens` tokens; return a pair of tensors for each layer."""
        shape = (1, _CONFIG["num_key_value_heads"], tokens, self.width)
        return [(torch.empty(shape), torch.empty(shape)) for _ in range(_CONFIG["num_hidden_layers"])]

    def save(self, tokens: list[int]) -> int:
        """Compute the KV of a sequence and save it on the node; return the number of bytes of the KV."""
        past = self.computed(tokens)
        pairs = [(layer.keys.contiguous(), layer.values.contiguous()) for layer in past.layers]
        self.cache.save(tokens, TensorMemory(pairs))
        return sum(one.nbytes for pair in pairs for one in pair)

    def step(self, tokens: list[int], past: Any) -> torch.Tensor:
        """Run the model on tokens that follow the tokens in the cache `past`; return the logits of the last token."""
        inputs = torch.tensor([tokens])
        logits: torch.Tensor = self.model(
            inputs, use_cache=True, logits_to_keep=1, **{self.cache_argument: past}
        ).logits
        return logits

    def computed(self, tokens: list[int], past: Any = None) -> Any:
        """Compute the KV of tokens and add it to the cache `past`, by default a new cache; return the cache."""
        past = DynamicCache(config=self.config) if past is None else past
        if tokens:
            self.step(tokens, past)
        return past

    def answer(self, context: list[int], question: list[int], new_tokens: int, *, load: bool) -> Answer:
        """Answer a question over a context. If `load` is true, load the context's KV from the node first."""
        began = time.monotonic()
        past, there, loading, missed = DynamicCache(config=self.config), 0, 0.0, ""
        if load:
            match = self.cache.lookup(context, leave=0, request="demo")
            pairs = self.room(match.tokens)
            there = self.cache.load(match, TensorMemory(pairs)) if match.tokens else 0
            loading = time.monotonic() - began
            if there < len(context) // BLOCK_TOKENS * BLOCK_TOKENS:
                missed = str(match.reason or "blocks that were found did not load")
            for number, (keys, values) in enumerate(pairs if there else ()):
                past.update(keys[..., :there, :], values[..., :there, :], number)
        # The context and the question are separate passes even if nothing was loaded. One pass over both could round
        # in another way than a pass over the question alone.
        past = self.computed(context[there:], past)
        answer: list[int] = []
        step, first_seconds = question, 0.0
        for _ in range(new_tokens):
            logits = self.step(step, past)
            answer.append(int(logits[0, -1].argmax()))
            first_seconds = first_seconds or time.monotonic() - began
            step = answer[-1:]
        return Answer(answer, first_seconds, there, loading, missed)


def main() -> None:
    """Read the request, save the context's KV if requested, answer the questions, and write the reply."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=prepared(ContextRequest))
    answerer = _Answerer(request.node)
    computed: list[Answer] = []
    loaded: list[Answer] = []
    with torch.inference_mode(), answerer.cache:
        nbytes = answerer.save(request.context) if request.saves else 0
        answerer.computed(request.context[:16])  # warm up, because a process's first pass takes longer
        for question in request.questions:
            computed.append(answerer.answer(request.context, question, request.new_tokens, load=False))
            if not request.saves:
                loaded.append(answerer.answer(request.context, question, request.new_tokens, load=True))
    sys.stdout.buffer.write(msgspec.json.encode(ContextReply(loaded, computed, nbytes)))


if __name__ == "__main__":
    main()

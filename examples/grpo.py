"""GRPO of a model whose rollouts are drafted (Shao et al., DeepSeekMath, arXiv 2402.03300, section 4.1).

The reward is the share of capital letters, so the style leaves that of the draft's training. Three engines with the
same weights generate the same rollouts: without a draft, with a frozen one, and with one that learns from them.

pip install "jspec-decoding[train,notebooks]"
python examples/grpo.py --model SmolLM2-135M-Instruct.Q4_1.gguf --draft HEAD --lora 16
"""

import argparse
import contextlib
import dataclasses
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jspec
from jspec.core import tree
from jspec.core.types import Params
from jspec.train.online import Learn

TOPICS = ("rain", "bread", "trains", "moons", "winter", "gardens", "seas", "music")
KINDS = {"none": {"drafter": None}, "frozen": {}, "following": {"learn": Learn()}}


def policy(model, rank, rate):
    """What is trained, the optimizer's state, and a step to the next ones and to weights for engines."""
    base, target = model.params.target, dataclasses.replace(model.target, exact=False)
    master = jax.tree.map(lambda x: x.astype(jnp.float32), base)
    matrices, structure = jax.tree.flatten(master.layers)
    optimizer, start = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate)), jax.nn.initializers.lecun_normal()
    # LoRA: two factors for each matrix, whose product is zero at first.
    shapes = [x.shape for x in matrices if x.ndim == 2 and rank]
    factors = [(start(jax.random.key(i), (a, rank)), jnp.zeros((rank, b))) for i, (a, b) in enumerate(shapes)]
    trained = factors if rank else master

    def merge(trained):
        if not rank:
            return trained
        pairs = iter(trained)
        changed = [x + jnp.matmul(*next(pairs)) if x.ndim == 2 else x for x in matrices]
        return dataclasses.replace(master, layers=structure.unflatten(changed))

    def loss(trained, tokens, sampled, advantage):
        # One step per rollout: the ratio of probabilities is 1, and its gradient that of the log-probability.
        weights = merge(trained)
        cache = target.init_cache(weights, len(tokens), 4, 4)
        logits = target.forward(weights, tree.chain(tokens[:, :-1]), cache, None).logits
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=2)[..., 0]
        return -(advantage[:, None] * logprobs).mean(where=sampled[:, 1:])

    @jax.jit
    def step(trained, state, *batch):
        updates, state = optimizer.update(jax.grad(loss)(trained, *batch), state)
        trained = optax.apply_updates(trained, updates)
        return trained, state, jax.tree.map(lambda new, old: new.astype(old.dtype), merge(trained), base)

    return trained, optimizer.init(trained), step


def pack(rollouts, width):
    """The texts as an array [B, width], a mask of the sampled tokens, and the advantages in groups of two prompts."""
    tokens, sampled = np.zeros((len(rollouts), width), np.int32), np.zeros((len(rollouts), width), bool)
    for row, mask, rollout in zip(tokens, sampled, rollouts, strict=True):
        end = len(rollout.prompt) + len(rollout.tokens)
        row[:end], mask[len(rollout.prompt) : end] = [*rollout.prompt, *rollout.tokens], True
    rewards = [sum(map(str.isupper, text)) / max(sum(map(str.isalpha, text)), 1) for text in rollouts.text]
    groups = np.reshape(rewards, (2, -1))
    advantage = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-4)
    return np.mean(rewards), (tokens, sampled, advantage.ravel())


def main() -> None:
    """Alternates between rollouts of all engines and a step of the policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled:python-small")
    parser.add_argument("--draft", help="an EAGLE-3 head or a block draft (default: that of a bundled model)")
    parser.add_argument("--lora", type=int, default=0, help="rank of the change of each matrix; 0: all weights learn")
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate of the policy")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--samples", type=int, default=8, help="rollouts of each of the two prompts of a step")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--picture", default="grpo.png")
    options = parser.parse_args()
    model = jspec.load(options.model, draft=options.draft, exact=True)
    prompts: list = [f"class {topic.title()}:\n" for topic in TOPICS]
    if not options.model.startswith("bundled:"):
        prompts = [model.tokenizer.chat([{"role": "user", "content": f"Write about {t} in CAPITALS."}]) for t in TOPICS]
    context, history = 64 + options.new_tokens, []
    trained, state, improve = policy(model, options.lora, options.rate)
    sampling = {"sampling": jspec.Sampling(temperature=1.0), "max_new_tokens": options.new_tokens, "logprobs": True}
    with contextlib.ExitStack() as stack:
        sizes = {"slots": 2 * options.samples, "context": context}
        engines = {name: stack.enter_context(jspec.Engine(model, **kind, **sizes)) for name, kind in KINDS.items()}
        for step in range(options.steps):
            chosen, line, plain = [prompts[(2 * step + i) % len(prompts)] for i in range(2)], "", None
            for name, engine in engines.items():
                began = time.perf_counter()
                rollouts = engine.generate(chosen, n=options.samples, seed=step, **sampling)
                plain = plain or rollouts
                assert (rollouts.tokens, rollouts.sampled_logprobs) == (plain.tokens, plain.sampled_logprobs)
                history.append(rollouts.stats.accept_length)
                line += f", {name} {history[-1]:.2f} in {time.perf_counter() - began:.2f} s"
            reward, batch = pack(plain, context)
            trained, state, weights = improve(trained, state, *batch)
            for engine in engines.values():
                engine.update(Params(weights, engine.params.draft))
            print(f"step {step}: reward {reward:.3f}; accept length{line[1:]}", flush=True)
    picture, axes = plt.subplots(layout="constrained")
    axes.legend(axes.plot(np.reshape(history, (-1, len(KINDS)))), list(KINDS))
    axes.set(xlabel="step", ylabel="accept length", ylim=(0, None))
    picture.savefig(options.picture)


if __name__ == "__main__":
    main()

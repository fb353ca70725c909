"""Chat models of random weights with templates of several kinds, and random chats in all layouts."""

import itertools
import json

import jax
from tokenizers import AddedToken

from jspec.checkpoints import language_model
from jspec.models import Llama
from jspec.train import tokenizer as files
from tools.pretrain import model, tokenizer

END = "<|im_end|>"
_TURN = "{{ '<|im_start|>' + m['role'] + '\n' }}"
TEMPLATES = {
    # Every turn is as it was when it was the last.
    "chatml": "{% for m in messages %}" + _TURN + "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    # A token that begins the text, and contents without the spaces around them.
    "trimmed": "{{ bos_token }}{% for m in messages %}" + _TURN + "{{ m['content'] | trim + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    # The prompt needs nothing after the user's turn, and the reply begins with a space.
    "inst": "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] + '<|im_end|>' }}"
    "{% else %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endif %}{% endfor %}",
    # Earlier replies lose what is before </think>, as those of reasoning models do.
    "thinking": "{% for m in messages %}" + _TURN + "{% if m['role'] == 'assistant' and not loop.last %}"
    "{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
}
BAD_TEMPLATE = TEMPLATES["chatml"].replace("'<|im_start|>assistant\n' }}{% endif", "'<|im_start|>helper\n' }}{% endif")

COLORS = ["red", "green", "blue", "black", "white", "yellow", "brown", "gray"]
THINGS = ["hat", "cat", "cup", "boat", "door", "tree", "lamp", "book"]
_TEXT = [f"{color} {thing}: the {thing} is {color}, user assistant system\n" for color in COLORS for thing in THINGS]


def make_tokenizer(vocab_size=330, text=_TEXT):
    """A byte-level BPE with the special tokens of the templates."""
    bpe = tokenizer.train(text, vocab_size - 3)
    bpe.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", END, "<s>")])
    return bpe


def write_tokenizer(directory, template, bpe=None):
    """Writes a tokenizer with a template; returns its vocabulary size."""
    bpe = make_tokenizer() if bpe is None else bpe
    directory.mkdir(parents=True, exist_ok=True)
    special = {"bos_token": "<s>", "eos_token": END}
    files.save(bpe, directory, 256, special, {"default": template})
    return bpe.get_vocab_size()


def write_model(directory, template=TEMPLATES["chatml"], *, max_length=256, **shape):
    """Writes a chat model of random weights."""
    vocab_size = write_tokenizer(directory, template)
    fields = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 3, "num_heads": 2, "num_kv_heads": 1} | shape
    config = Llama(vocab_size=vocab_size, head_dim=16, max_length=max_length, tie_embeddings=True, **fields)
    params = model.init_params(config, jax.random.key(0))
    end = make_tokenizer().token_to_id(END)
    language_model.save(directory, config, params, dtype="float32", eos=(end,))
    return config


def random_messages(rng, *, turns=None, thinking=False):
    """Messages as OpenAI's API takes them: sometimes a system prompt, then user and assistant in turns."""
    messages = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": rng.choice(["be brief", "éß 你好", " spaces "])})
    for _ in range(rng.randint(1, 4) if turns is None else turns):
        color, thing = rng.choice(COLORS), rng.choice(THINGS)
        messages.append({"role": "user", "content": rng.choice([f"{color} {thing}?", f"\n{thing}\n\n", "🙂 x  y"])})
        thought = f"<think>{color}</think>" if thinking and rng.random() < 0.5 else ""
        reply = rng.choice([f"the {thing} is {color}", f"  {color}\n\n", "\nyes", "a" * rng.randint(1, 9)])
        messages.append({"role": "assistant", "content": thought + reply})
    return messages


_SPEAKERS = {
    "system": ["system"],
    "user": ["human", "user", "Human"],
    "assistant": ["gpt", "assistant", "chatgpt", "model", "bot"],
}


def as_sharegpt(rng, messages):
    """The same chat in the layout of ShareGPT."""
    turns = [{"from": rng.choice(_SPEAKERS[m["role"]]), "value": m["content"]} for m in messages]
    return {"id": "x", "conversations": turns}


def as_openai(rng, messages):
    """The same chat in one of the layouts of OpenAI."""
    if rng.random() < 0.5:
        messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    return {"messages": messages}


def questions(count, start=0):
    """Chats with structure: each thing has one color, which a model can learn."""
    pairs = itertools.cycle(itertools.product(THINGS, COLORS))
    for index, (thing, color) in enumerate(itertools.islice(pairs, start, start + count), start):
        yield {
            "messages": [
                {"role": "user", "content": f"{color} {thing} {index}?"},
                {"role": "assistant", "content": f"the {thing} is {color}, the {thing} is {color}"},
            ]
        }


def write_lines(path, values):
    """Writes JSONL."""
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path

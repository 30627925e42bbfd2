"""Train the tiny byte-level Qwen3 model kept in ``tiny-qwen3/``.

The text is the King James Bible of 1611, out of copyright, as the Debian package ``bible-kjv`` prints it:

    apt-get install bible-kjv
    bible -f gen1:1-rev22:21 < /dev/null > kjv.txt
    python train.py kjv.txt tiny-qwen3 --sample sample.txt

Each line of that file is one verse after its reference ("Ge1:1 In the beginning ..."). The references are dropped, and
a chapter becomes one document of one verse per line. The last 56 chapters, Hebrews to Revelation, are held out.

Training is in float32 on one CPU thread and takes about 25 minutes. The weights are then stored in bfloat16, and the
losses printed at the end are those of the stored folder, loaded again.
"""

import argparse
import math
import time
from itertools import groupby
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    get_cosine_schedule_with_warmup,
)

END_OF_TEXT = "<|endoftext|>"
END_ID = 256  # ids 0 to 255 are the bytes themselves
CONTEXT = 512
BATCH = 4
PEAK_LEARNING_RATE = 2e-3
WARMUP_STEPS = 200
HELD_OUT_CHAPTERS = 56
SAMPLE_BYTES = 16_000


def read_chapters(path: Path) -> list[str]:
    """Read the output of ``bible -f`` as one string per chapter, without the verse references."""
    verses = [line.split(" ", 1) for line in path.read_text(encoding="ascii").splitlines()]
    chapters = groupby(verses, key=lambda verse: verse[0].split(":")[0])
    return ["".join(f"{text}\n" for _, text in chapter) for _, chapter in chapters]


def to_stream(chapters: list[str]) -> torch.Tensor:
    """Join chapters into one stream of token ids, with an end-of-text token before, between and after them."""
    ids = [END_ID]
    for chapter in chapters:
        ids += [*chapter.encode(), END_ID]
    return torch.tensor(ids)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer without merges, whose token ids are the values of the UTF-8 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # ByteLevel writes a printable byte as itself and the others, in order, as characters above 255.
    stand_ins = iter([char for char in alphabet if ord(char) > 255])
    vocab = {chr(byte) if chr(byte) in alphabet else next(stand_ins): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab={**vocab, END_OF_TEXT: END_ID}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def make_model() -> Qwen3ForCausalLM:
    """Build the model; its heads together are wider than its hidden size, so the two cannot be confused."""
    config = Qwen3Config(
        vocab_size=END_ID + 1,
        hidden_size=160,
        intermediate_size=480,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        bos_token_id=END_ID,
        eos_token_id=END_ID,
    )
    return Qwen3ForCausalLM(config)


def train(model: Qwen3ForCausalLM, stream: torch.Tensor, steps: int) -> None:
    """Train in place on windows drawn at random from the stream."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95))
    schedule = get_cosine_schedule_with_warmup(optimizer, WARMUP_STEPS, steps)
    windows = stream.unfold(0, CONTEXT + 1, 1)
    model.train()
    began = time.monotonic()
    recent = []
    for step in range(1, steps + 1):
        batch = windows[torch.randint(len(windows), (BATCH,))]
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        recent.append(loss.item())
        if step % 100 == 0 or step == steps:
            mean = sum(recent) / len(recent)
            print(f"step {step}: loss {mean:.4f} nats, {time.monotonic() - began:.0f} s", flush=True)
            recent.clear()


@torch.inference_mode()
def report(name: str, model: torch.nn.Module, stream: torch.Tensor) -> None:
    """Print the mean loss over the stream, cut into windows that do not overlap, and how often the top token is right.

    A window starts without any context. A token is a byte, but for the end-of-text tokens, of which there is one for
    a chapter; bits per byte charges their cost to the bytes.
    """
    model.eval()
    nats, right, tokens, size = 0.0, 0, 0, 0
    for batch in stream[: (len(stream) - 1) // CONTEXT * CONTEXT + 1].unfold(0, CONTEXT + 1, CONTEXT).split(8):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits.float().flatten(0, 1)
        targets = batch[:, 1:].flatten()
        nats += cross_entropy(logits, targets, reduction="sum").item()
        right += int((logits.argmax(-1) == targets).sum())
        tokens += len(targets)
        size += int((targets != END_ID).sum())
    loss, bits, top = nats / tokens, nats / math.log(2) / size, right / tokens
    print(f"{name}, {size} bytes: {loss:.4f} nats per token, {bits:.4f} bits per byte, top-1 {top:.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tiny byte-level Qwen3 model.")
    parser.add_argument("text", type=Path, help="the output of: bible -f gen1:1-rev22:21")
    parser.add_argument("output", type=Path, help="folder to write in Hugging Face format")
    parser.add_argument("--sample", type=Path, help="also write the beginning of the held-out text to this file")
    parser.add_argument("--steps", type=int, default=4200, help="training steps (default: %(default)s)")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    chapters = read_chapters(args.text)
    held_out = chapters[-HELD_OUT_CHAPTERS:]
    train_stream = to_stream(chapters[:-HELD_OUT_CHAPTERS])
    held_out_stream = to_stream(held_out)
    if args.sample:
        head = "".join(held_out)[:SAMPLE_BYTES]
        args.sample.write_text(head[: head.rindex("\n") + 1], encoding="ascii")

    model = make_model()
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {len(train_stream)} tokens to train on")
    train(model, train_stream, args.steps)
    report("held out, float32", model, held_out_stream)

    model.to(torch.bfloat16).save_pretrained(args.output)
    make_tokenizer().save_pretrained(args.output)
    tokenizer = AutoTokenizer.from_pretrained(args.output)
    text = "".join(held_out) + "naïve 火 🜂"
    ids = tokenizer.encode(text, verbose=False)
    if ids != list(text.encode()) or tokenizer.decode(ids) != text:
        raise SystemExit("the stored tokenizer does not give back the text")
    stored = AutoModelForCausalLM.from_pretrained(args.output, dtype=torch.bfloat16)
    report("held out, bfloat16 as stored", stored, held_out_stream)
    # As many training tokens as held-out ones, taken from the middle.
    middle = len(train_stream) // 2
    report("trained on, bfloat16 as stored", stored, train_stream[middle : middle + len(held_out_stream)])


if __name__ == "__main__":
    main()

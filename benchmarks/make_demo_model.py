"""Makes the demo's model: tokenizer, training, checkpoint, held-out prompts, figures for the card.

    python benchmarks/make_demo_model.py --work DIR --minutes 60      # train (or resume) and write --out
    python benchmarks/make_demo_model.py --work DIR --report          # measure what --out holds

Text comes from Debian packages (``demo_corpus.py``); everything but the result lives in ``--work``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any

import demo_corpus
import numpy as np
import torch
from demo_train import Recipe, build, load_progress, train

VOCABULARY = 4096
END, PAD = "<|endoftext|>", "<|pad|>"
OUT = Path(__file__).resolve().parent.parent / "daop" / "assets" / "demo"
Streams = dict[str, dict[str, np.ndarray[Any, Any]]]  # split -> domain -> token ids


def make_tokenizer(path: Path, texts: list[str]) -> None:
    """Byte-level BPE fitted on ``texts``, written to ``path`` as tokenizer.json has it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


def streams(work: Path) -> Streams:
    """Token ids of both splits, one stream per domain, documents in random order with END between.

    Made once and kept in ``work``; ``bytes.json`` there has the UTF-8 bytes of each stream.
    """
    folder = work / "tokens"
    if not (folder / "bytes.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        _make_streams(work, folder)
    return {
        split: {
            domain: np.load(folder / f"{split}-{domain}.npy", mmap_mode="r", allow_pickle=False)
            for domain in demo_corpus.DOMAINS
        }
        for split in ("train", "heldout")
    }


def _make_streams(work: Path, folder: Path) -> None:
    from tokenizers import Tokenizer

    demo_corpus.fetch(work)
    texts: dict[tuple[str, str], list[str]] = {}
    for document in demo_corpus.documents(work):
        split = "heldout" if document.heldout else "train"
        texts.setdefault((split, document.domain), []).append(document.text)
    rng = np.random.default_rng(0)
    for group in texts.values():
        rng.shuffle(group)
    sample = [
        text[:20_000] for (split, _), group in texts.items() if split == "train" for text in group[:150]
    ]
    make_tokenizer(work / "tokenizer.json", sample)
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    sizes: dict[str, int] = {}
    for (split, domain), group in texts.items():
        ids = [np.array([*encoding.ids, end], dtype=np.uint16) for encoding in tokenizer.encode_batch(group)]
        np.save(folder / f"{split}-{domain}.npy", np.concatenate(ids), allow_pickle=False)
        sizes[f"{split}-{domain}"] = sum(len(text.encode()) for text in group)
    (folder / "bytes.json").write_text(json.dumps(sizes, indent=1))


def configuration() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=72,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=2048,
        initializer_range=0.05,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )


def export(checkpoint: Path, work: Path, out: Path) -> None:
    """Write the bf16 model and its tokenizer to ``out`` and prove that they load as they were."""
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

    model = build(configuration())
    load_progress(checkpoint, model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())  # rounded, yet computed in float32
    model.generation_config.update(eos_token_id=0, pad_token_id=1)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    text = "def main():\n    return 0\n\nLe système est prêt."
    with torch.no_grad():
        ids = torch.tensor([Tokenizer.from_file(str(work / "tokenizer.json")).encode(text).ids])
        expected = model(ids).logits
    model.bfloat16().save_pretrained(partial)
    _also_say_num_experts(partial / "config.json")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(work / "tokenizer.json"), eos_token=END, pad_token=PAD, model_max_length=2048
    )
    tokenizer.save_pretrained(partial)
    again = AutoModelForCausalLM.from_pretrained(partial, dtype=torch.float32, experts_implementation="eager")
    ids = AutoTokenizer.from_pretrained(partial)(text, return_tensors="pt").input_ids
    with torch.no_grad():
        difference = float((expected - again(ids).logits).abs().max())
    if difference > 1e-4:
        raise SystemExit(f"the saved model's logits differ from the trained one's by {difference}")
    print(f"logits of the saved model, float32: largest difference {difference:.1e}")
    out.mkdir(parents=True, exist_ok=True)
    for path in partial.iterdir():
        path.chmod(0o644)
        os.replace(path, out / path.name)
    partial.rmdir()


def _also_say_num_experts(path: Path) -> None:
    """Published qwen3_moe checkpoints call it num_experts, this version of transformers num_local_experts."""
    config = json.loads(path.read_text("utf-8"))
    config["num_experts"] = config.get("num_experts", config.get("num_local_experts"))
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_prompts(work: Path, out: Path) -> None:
    rows = demo_corpus.prompts(work, count=16, heldout=True, seed=3)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    (out / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for packages, tokens, checkpoints")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the model (default: %(default)s)")
    parser.add_argument("--checkpoint", type=Path, help="default: WORK/checkpoint.safetensors")
    limit = parser.add_mutually_exclusive_group(required=True)
    limit.add_argument("--minutes", type=float, help="train for so long, an earlier part included")
    limit.add_argument("--tokens", type=int, help="train on so many tokens")
    limit.add_argument("--export", action="store_true", help="only write the checkpoint to --out")
    limit.add_argument("--report", action="store_true", help="only measure the model in --out")
    parser.add_argument("--workers", type=int, default=2, help="single-threaded processes (default 2)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    checkpoint = args.checkpoint or args.work / "checkpoint.safetensors"
    data = streams(args.work)
    if args.report:
        import demo_report

        demo_report.main(args.work, args.out, checkpoint, data)
        return
    if not args.export:
        recipe = Recipe(
            minutes=args.minutes, tokens=args.tokens, checkpoint=checkpoint,
            start=args.work / "start.safetensors", workers=args.workers,
            seed=args.seed,
        )  # fmt: skip
        train(configuration(), [np.asarray(stream) for stream in data["train"].values()], recipe)
    export(checkpoint, args.work, args.out)
    write_prompts(args.work, args.out)


if __name__ == "__main__":
    main()

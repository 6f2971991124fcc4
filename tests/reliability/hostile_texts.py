"""Settings, scripts, keys and lists that lie, swell, or would run something if anybody let them."""

from __future__ import annotations

from pathlib import Path

__all__ = ["hostile_texts"]


def hostile_texts(folder: Path, mark: Path) -> list[Path]:
    """All of them, written into a new folder; what they would run creates ``mark``."""
    folder.mkdir()
    run = f"touch {mark}"
    texts = {
        "T01_tables.toml": "[" + ".".join(["a"] * 100_000) + "]\nb = 1\n",
        "T02_brackets.toml": "a = " + "[" * 100_000 + "]" * 100_000 + "\n",
        "T03_interpolation.toml": f'[train]\nrun_dir = "${{oc.env:HOME}}/$({run})"\n',
        "T04_digits.toml": "[model]\nnum_layers = " + "9" * 100_000 + "\n",
        "T05_layers.toml": "[model]\nnum_layers = 1000000000\nhidden_size = 1099511627776\n",
        "T06_nested.json": '{"a":' * 100_000 + "1" + "}" * 100_000,
        "T07_twice.json": '{"train_batch_size": 1, "train_batch_size": 2}',
        "T08_not_finite.json": '{"train_batch_size": NaN, "gradient_clipping": Infinity}',
        "T09_object.yaml": f"!!python/object/apply:os.system ['{run}']\n",
        "T10_laughs.yaml": _laughs(),
        "T11_substitution.sh": f"X=$({run})\npython pretrain_gpt.py --num-layers `{run}` $X\n",
        "T12_here_document.sh": f"cat <<EOF > d.json\n$({run})\nEOF\n{run}\npython train.py\n",
        "T13_loop.sh": "while true; do X=$X$X; done\npython pretrain_gpt.py --num-layers 1\n",
        "T14_doubling.sh": "A=xxxxx\n" + "A=$A$A\n" * 60 + "python pretrain_gpt.py --load $A\n",
        "T15_itself.sh": 'source "${BASH_SOURCE[0]}"\nA=$A\npython pretrain_gpt.py --load $A\n',
        "T16_module.py": f"import os\nos.system({run!r})\n",
        "T17_escapes.txt": "\x1b[2J\x1b]0;owned\x07\u202e<script>alert(1)</script>=cmd()\n",
        "T18_key.pem": "-----BEGIN PRIVATE KEY-----\n" + "A" * 100_000 + "\n-----END",
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "T19_zeros.json").write_bytes(b"{" + bytes(1_000_000))
    with (folder / "T20_hole.toml").open("wb") as file:
        file.truncate(600 * 2**20)
    return sorted(folder.iterdir())


def _laughs() -> str:
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60)]
    return "\n".join(lines) + "\n"

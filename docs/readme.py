"""Write README.md from nbs/index.ipynb: its text, its code and what the code printed.

    python docs/readme.py            writes README.md
    python docs/readme.py --check    fails if README.md is not what would be written
"""
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = "![A grouped GEMM and the derivative of its gated activation in one kernel](docs/hero.svg)"


def code_text(cell: dict) -> str:
    "A code cell as a fenced block, and its printed output as another."
    printed = "".join("".join(out["text"]) for out in cell["outputs"] if out["output_type"] == "stream" and out["name"] == "stdout")
    source = re.sub(r"\A(#\|.*\n)+", "", "".join(cell["source"]))
    return f"```python\n{source}\n```" + (f"\n\n```text\n{printed.rstrip()}\n```" if printed else "")


def readme() -> str:
    "The whole README; links that leave nbs/ become relative to the top."
    cells = json.loads((ROOT / "nbs/index.ipynb").read_text(encoding="utf-8"))["cells"]
    parts = ["".join(cell["source"]) if cell["cell_type"] == "markdown" else code_text(cell) for cell in cells]
    return "\n\n".join([parts[0], PICTURE, *parts[1:]]).replace("](../", "](") + "\n"


if __name__ == "__main__":
    target = ROOT / "README.md"
    if "--check" not in sys.argv: target.write_text(readme(), encoding="utf-8")
    elif target.read_text(encoding="utf-8") != readme(): raise SystemExit("README.md is not what nbs/index.ipynb gives. Run: python docs/readme.py")

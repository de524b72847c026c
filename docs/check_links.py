"""Check a built site: every link and anchor inside it leads somewhere, no page loads anything from outside, every
picture has alt text.

    python docs/check_links.py [FOLDER]        FOLDER is docs_site/ unless given
"""
from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ASSETS = {("link", "href"), ("use", "href"), ("image", "href"), ("object", "data"), ("source", "srcset"),
          *((tag, "src") for tag in ("script", "img", "source", "iframe", "video", "audio", "embed"))}


class Page(HTMLParser):
    "What a page links to, what it loads, and which anchors it has."

    def __init__(self, text: str):
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[tuple[str, bool]] = []     # (address, whether the browser loads it by itself)
        self.no_alt: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        self.links += [(found["href"], False)] if tag == "a" and "href" in found else []
        self.links += [(found[name], True) for name in found if (tag, name) in ASSETS]
        if tag == "img" and not found.get("alt", "").strip():
            self.no_alt.append(found.get("src", "?"))


def problems(site: Path, forbidden: tuple[str, ...] = ()) -> list[str]:
    "One line for each fault; `forbidden` are strings (such as this machine's paths) that no file may hold."
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    faults = []
    for path, page in pages.items():
        here = path.relative_to(site).as_posix()
        faults += [f"{here}: the picture {src} has no alt text" for src in page.no_alt]
        faults += [f"{here}: {fault}" for address, loads in page.links
                   if (fault := fault_of(address, loads, path, site, pages))]
    for path in sorted(site.rglob("*.css")):
        for address in re.findall(r"(?:url\(|@import\s+)['\"]?([^'\")\s]+)", path.read_text(encoding="utf-8")):
            if fault := fault_of(address, True, path, site, pages):
                faults.append(f"{path.relative_to(site).as_posix()}: {fault}")
    for path in sorted(p for p in site.rglob("*") if p.is_file()):
        data, here = path.read_bytes(), path.relative_to(site).as_posix()
        faults += [f"{here}: holds the path {bad}" for bad in forbidden if bad.encode() in data]
    return sorted(set(faults))


def fault_of(address: str, loads: bool, path: Path, site: Path, pages: dict[Path, Page]) -> str | None:
    "What is wrong with one address on the page `path`, if anything."
    url = urlsplit(address)
    if url.scheme == "data":
        return None
    if url.scheme or url.netloc:
        if loads:
            return f"loads {address} from outside"
        return None if url.scheme in ("https", "mailto") else f"{address} is not an https address"
    target = (path.parent / unquote(url.path)).resolve() if url.path else path.resolve()
    if not target.is_relative_to(site.resolve()):
        return f"{address} leads out of the site"
    if not target.is_file():
        return f"{address} leads nowhere"
    if url.fragment and target.suffix == ".html":
        page = pages[site / target.relative_to(site.resolve())]
        if unquote(url.fragment) not in page.anchors:
            return f"{address}: the page has no such anchor"
    return None


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "docs_site"
    found = problems(folder)
    print("\n".join(found) or f"{folder.name}: all links lead somewhere, nothing is loaded from outside")
    sys.exit(bool(found))

"""The demo model's text: what Debian packages ship, as documents in eight domains.

Each package is fetched with ``apt-get download`` (so this needs Debian or Ubuntu with package lists),
unpacked without being installed, and turned into plain text. A document is one file; whether it is
for training or held out depends only on a hash of its path, so no file is ever in both splits.

    python benchmarks/demo_corpus.py --work DIR                                   # what there is, per domain
    python benchmarks/demo_corpus.py --work DIR --prompts-out FILE --count N --split heldout
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html.parser
import json
import random
import re
import subprocess
import tarfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELDOUT_SHARE = 0.06
HELDOUT_LIMIT = 150_000  # characters of held-out text kept per source
PERSONAL = re.compile(
    r"copyright|licen[cs]e|©|@\w+\.|aut[eh]?[uo]r|debian\.org", re.I
)  # not wanted in a prompt
LONGEST_LINE = 1000  # a longer one is minified or generated code


@dataclass(frozen=True, kw_only=True)
class Source:
    """Files of one Debian package; ``demo_sources.toml`` says what the fields mean."""

    domain: str
    package: str
    licence: str
    patterns: tuple[str, ...]
    reader: str
    limit: int = 8_000_000
    skip: str = "(?!)"  # paths to leave out, a regular expression
    archive: str = ""  # a tar file inside the package that has the files


@dataclass(frozen=True, kw_only=True)
class Document:
    domain: str
    source: str
    path: str
    licence: str
    text: str

    @property
    def heldout(self) -> bool:
        return _hash(f"{self.source}:{self.path}") < HELDOUT_SHARE


def _hash(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


def plain(text: str) -> str:
    return text


def code(text: str) -> str:
    """Source code without the licence comment that opens it."""
    opening = re.match(r"\s*(/\*.*?\*/|\(\*.*?\*\)|(?:(?:#|//)[^\n]*\n)+)", text, re.S)
    if opening and re.search("copyright|licen[cs]e", opening.group(0), re.I):
        text = text[opening.end() :]
    return text.lstrip("\n")


def manual_page(text: str) -> str:
    """Text of a page in the man(7) macros: headings and paragraphs, no fonts, no tables and not the closing
    section that names the translators."""
    lines: list[str] = []
    for line in text.splitlines():
        if re.match(r'\.SH "?(TRADU|ÜBERSETZUNG|COPYRIGHT|DROITS? D|LICEN)', line):
            break
        if line.startswith((".so", '.\\"', "'\\\"", '\\"')):
            continue
        if line.startswith((".SH", ".SS", ".PP", ".P", ".TP", ".IP", ".LP", ".sp")):
            lines.append("")
        elif re.match(r"[.'](TH|de|ig|nh|ad|ie|el|if|nr|ds|TS|TE)\b", line) or line in (".", ".."):
            continue
        line = re.sub(r"^[.'](?:SH|SS|IP|B[IR]?|I[BR]?|R[BI]|SM|SB|UR|MT|EE|EX|\w\w?)\b ?", "", line)
        line = re.sub(r"\\f(?:\[\w*\]|\(..|.)", "", line)
        line = re.sub(r"\\[&|/,:]|\\s[+-]?\d+|\\c$", "", line).replace('"', "")
        for escape, character in {
            "\\-": "-", "\\(aq": "'", "\\(dq": '"', "\\(bu": "•", "\\(em": "—", "\\(en": "–", "\\e": "\\",
            "\\ ": " ", "\\(co": "©", "\\(ti": "~", "\\(ha": "^", "\\(lq": "“", "\\(rq": "”", "\\(bs": "\\",
            "\\(Fo": "«", "\\(Fc": "»", "\\'": "´", "\\`": "`", "\\(rs": "\\", "\\~": " ", "\\%": "",
            "\\(oq": "‘",
        }.items():  # fmt: skip
            line = line.replace(escape, character)
        lines.append(re.sub(r"\\\[\w+\]|\\\(..|\\\*\(..", "", line).rstrip())
    return "\n".join(lines)


def pod(text: str) -> str:
    """Perl's documentation format without its commands and formatting codes."""
    text = re.sub(r"(?m)^=(?:head\d|item|over|back|cut|pod|encoding|for|begin|end) ?", "", text)
    for _ in range(2):
        text = re.sub(r"\b[BCEFILSXZ]<([^<>]*)>", r"\1", text)
    return text


def fortune(text: str) -> str:
    return re.sub(r"(?m)^%$", "", text)


class _Text(html.parser.HTMLParser):
    """Collects the text of a page, one paragraph a line."""

    blocks = frozenset(
        ["p", "h1", "h2", "h3", "h4", "h5", "li", "dt", "dd", "pre", "div", "tr", "td", "br", "title"]
    )

    def __init__(self) -> None:
        super().__init__()
        self.out: list[str] = []
        self.hidden = 0
        self.preformatted = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.hidden += tag in ("script", "style")
        self.preformatted += tag == "pre"
        if tag in self.blocks:
            self.out.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in ("script", "style")
        self.preformatted -= tag == "pre"
        if tag in self.blocks:
            self.out.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.out.append(data if self.preformatted else re.sub(r"\s+", " ", data))


def web_page(text: str) -> str:
    parser = _Text()
    parser.feed(text)
    text = re.sub(r"(?m)^ (?=\S)", "", "".join(parser.out))
    return re.sub(r"(?m)^(Prev|Next|Précédent|Suivant|Zurück|Weiter|Anterior|Siguiente)\n", "", text)


READERS = {read.__name__: read for read in (plain, code, manual_page, pod, fortune, web_page)}


def sources() -> tuple[Source, ...]:
    """The list beside this file."""
    listed = tomllib.loads(Path(__file__).with_name("demo_sources.toml").read_text("utf-8"))["source"]
    return tuple(Source(**{**entry, "patterns": tuple(entry["patterns"])}) for entry in listed)


SOURCES = sources()
DOMAINS = tuple(dict.fromkeys(source.domain for source in SOURCES))


def fetch(work: Path) -> dict[str, str]:
    """Download and unpack what is not there yet; the version of each package."""
    debs, unpacked = work / "debs", work / "packages"
    for folder in (debs, unpacked):
        folder.mkdir(parents=True, exist_ok=True)
    versions: dict[str, str] = {}
    for package in dict.fromkeys(source.package for source in SOURCES):
        if not list(debs.glob(f"{package}_*.deb")):
            subprocess.run(["apt-get", "download", package], cwd=debs, check=True, capture_output=True)
        (deb,) = debs.glob(f"{package}_*.deb")
        versions[package] = deb.name.split("_")[1].replace("%3a", ":")
        if not (unpacked / package).exists():
            subprocess.run(["dpkg-deb", "-x", deb, unpacked / package], check=True)
            for archive in {source.archive for source in SOURCES if source.package == package} - {""}:
                for path in (unpacked / package).glob(archive):
                    with tarfile.open(path) as tar:
                        tar.extractall(unpacked / package, filter="data")
    return versions


def _files(source: Source, work: Path) -> list[tuple[str, Path]]:
    """The source's files by a repeatable shuffle, paths relative to the package."""
    root = work / "packages" / source.package
    files: dict[str, Path] = {}
    for pattern in source.patterns:
        for path in root.glob(pattern):
            name = path.relative_to(root).as_posix()
            if path.is_file() and not path.is_symlink() and not re.search(source.skip, "/" + name):
                files[name] = path
    return sorted(files.items(), key=lambda item: _hash(item[0]))


def documents(work: Path) -> Iterator[Document]:
    """All documents of both splits, within the limits; needs what ``fetch`` leaves."""
    seen: set[str] = set()
    for source in SOURCES:
        taken = {False: 0, True: 0}
        for name, path in _files(source, work):
            raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            text = READERS[source.reader](raw.decode("utf-8", errors="ignore")).replace("\r\n", "\n")
            text = re.sub(r"[ \t]+\n", "\n", text.expandtabs(4))
            text = re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
            digest = hashlib.sha256(text.encode()).hexdigest()
            if len(text) < 400 or digest in seen or max(map(len, text.split("\n"))) > 8 * LONGEST_LINE:
                continue
            seen.add(digest)
            document = Document(
                domain=source.domain, source=source.package, path=name, licence=source.licence, text=text
            )
            taken[document.heldout] += len(text)
            if taken[document.heldout] <= (HELDOUT_LIMIT if document.heldout else source.limit):
                yield document


def prompts(work: Path, *, count: int, heldout: bool, seed: int = 0) -> Iterator[dict[str, str]]:
    """``count`` excerpts a few lines long, the domains in turn, each starting where a paragraph does."""
    rng = random.Random(seed)
    pools: dict[str, list[Document]] = {domain: [] for domain in DOMAINS}
    for document in documents(work):
        if document.heldout == heldout:
            pools[document.domain].append(document)
    for number in range(count):
        domain = DOMAINS[number % len(DOMAINS)]
        while True:
            document = rng.choice(pools[domain])
            starts = [match.end() for match in re.finditer(r"\n\n(?=\S)", document.text)] or [0]
            start = rng.choice(starts)
            excerpt = document.text[start : start + rng.randint(200, 600)]
            excerpt = excerpt[: excerpt.rfind("\n") if excerpt.count("\n") > 4 else excerpt.rfind(" ")]
            if len(excerpt) >= 120 and excerpt.count("\n") > 1 and not PERSONAL.search(excerpt):
                break
        yield {
            "prompt": excerpt,
            "domain": domain,
            "source": f"{document.source}: {document.path}",
            "licence": document.licence,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for the packages (about 1 GB)")
    parser.add_argument("--prompts-out", type=Path, help="write excerpts to this JSONL file")
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--split", choices=("train", "heldout"), default="heldout")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    fetch(args.work)
    if args.prompts_out:
        rows = prompts(args.work, count=args.count, heldout=args.split == "heldout", seed=args.seed)
        args.prompts_out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        return
    sizes: dict[tuple[str, str, bool], list[int]] = {}
    for document in documents(args.work):
        key = (document.domain, document.source, document.heldout)
        sizes.setdefault(key, []).append(len(document.text))
    for (domain, package, out), lengths in sizes.items():
        split = "heldout" if out else "train"
        print(
            f"{domain:12}{package:28}{split:8}{len(lengths):6} files {sum(lengths) / 1e6:8.2f} M characters"
        )


if __name__ == "__main__":
    main()

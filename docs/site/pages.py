"""A hook of MkDocs: pages for files outside of docs/, and links that lead to them.

The documents link to files of the repository. Markdown files become pages of their own, other files
pages with their text under source/; links to folders lose their link.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md",
         "CHANGELOG.md": "CHANGELOG.md", "benchmarks/NOTES.md": "benchmarks/NOTES.md"}
ROOMS = {"core": "What everything stands on", "mesh": "Who computes", "partition": "Who holds what",
         "attention": "What one rank computes", "ring": "Contexts, attention, plans"}
IMAGES = {".svg", ".png"}
LANGUAGES = {".hpp": "cpp", ".h": "c", ".c": "c", ".cpp": "cpp", ".cu": "cuda", ".py": "python",
             ".json": "json", ".txt": "cmake", ".sh": "bash"}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s:]+)\)")
BLOCKS = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
# A block inside an item of a list. MkDocs wants four spaces and a blank line after it, GitHub two spaces.
IN_ITEM = re.compile(r"(?<=\n\n)(?: {2,3}```(?s:.*?)\n {2,3}```(?=\n)| {2,3}\S.*(?:\n {2}.*)*)")
OPTION = re.compile(r"    (\w+): (.*?)(?:  # (.*))?")


def place_of(page: str) -> str:
    """The path in the repository of a page."""
    for path, uri in PAGES.items():
        if uri == page:
            return path
    return "docs/" + page


def page_of(path: str) -> str | None:
    """The page, or the file of the site, for a path in the repository; None for a folder."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if not (ROOT / path).is_file():
        return None
    return f"source/{path}" if Path(path).suffix in IMAGES else f"source/{path}.md"


def links_of(text: str, place: str) -> list[tuple[str, str]]:
    """The links of a document that stays at `place`, each with its path in the repository."""
    found = []
    for _, _, target in LINK.findall(text):
        name = target.partition("#")[0]
        if name:
            found.append((target, posixpath.normpath(
                posixpath.join(posixpath.dirname(place), name))))
    return found


def public_headers() -> dict[str, list[str]]:
    """The headers that are installed, by folder, as CMake lists them."""
    found = {}
    for room in ROOMS:
        text = (ROOT / room / "CMakeLists.txt").read_text()
        listed = re.search(r"PUBLIC_HEADERS\s+(.*?)\n\s+[A-Z_]+ ", text, re.DOTALL)
        found[room] = [f"{room}/include/annulus/{name}" if (
            ROOT / room / "include/annulus" / name).is_file() else
            f"{room}/include/annulus/{room}/{name}" for name in listed[1].split()]
    return found


def declared(header: str) -> str:
    """The types that a header declares."""
    names = re.findall(r"^(?:typedef )?(?:class|struct|enum class) (\w+)(?= \{| final| :|;)",
                       (ROOT / header).read_text(), re.MULTILINE)
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))


def cpp_reference() -> str:
    lines = ["# C and C++", "",
             "Every header that is installed. `annulus/annulus.hpp` includes all that most programs "
             "need, and `annulus/annulus.h` is the interface for C. The comments of each header "
             "give shapes, units and errors, and say which calls are collective.", ""]
    for room, headers in public_headers().items():
        lines += [f"## {ROOMS[room]}", "", "| header | declares |", "|---|---|"]
        for header in headers:
            shown = header.partition("include/")[2]
            lines.append(f"| [`{shown}`](../{page_of(header)}) | {declared(header)} |")
        lines.append("")
    return "\n".join(lines)


def python_options() -> str:
    """A table of the keywords of attention: the fields of annulus.Options, with their comments."""
    source = (ROOT / "python/annulus/_options.py").read_text()
    fields = source.partition("class Options")[2].partition("\n\n\n")[0].splitlines()
    rows = [f"| `{name}` | `{kind}` | {comment or ''} |" for name, kind, comment in
            (found.groups() for found in map(OPTION.fullmatch, fields) if found)]
    return "\n".join(["| keyword | type | meaning |", "|---|---|---|", *rows])


def on_files(files, config):
    texts = {place_of(file.src_uri): Path(file.abs_src_path).read_text()
             for file in files.documentation_pages()}
    for path, uri in PAGES.items():
        texts[path] = (ROOT / path).read_text()
        files.append(File.generated(config, uri, content=texts[path]))
    sources = {path for place, text in texts.items() for _, path in links_of(text, place)
               if not path.startswith("docs/") and path not in PAGES and (ROOT / path).is_file()}
    sources |= {header for headers in public_headers().values() for header in headers}
    for path in sorted(sources):
        if Path(path).suffix in IMAGES:
            files.append(File.generated(config, page_of(path), abs_src_path=str(ROOT / path)))
            continue
        language = LANGUAGES.get(Path(path).suffix, "text")
        content = f"# {path}\n\n````{language}\n{(ROOT / path).read_text()}\n````\n"
        files.append(File.generated(config, page_of(path), content=content))
    files.append(File.generated(config, "reference/cpp.md", content=cpp_reference()))
    return files


def on_page_content(html, page, config, files):
    # A browser would break a line after the hyphens of an option.
    return re.sub(r"<code>[^<\n]*</code>", lambda code: re.sub(
        r"--[a-z][\w-]*", r'<span class="word">\g<0></span>', code[0]), html)


def on_page_markdown(markdown, page, config, files):
    uri = page.file.src_uri
    if page.parent is None:  # the menu beside it would have one line
        page.meta["hide"] = ["navigation"]
    if uri.startswith(("source/", "reference/")):
        return markdown.replace("<!-- options -->", python_options())
    place = place_of(uri)

    def relinked(match):
        image, text, target = match.groups()
        name, mark, anchor = target.partition("#")
        if not name:
            return match[0]
        found = page_of(posixpath.normpath(posixpath.join(posixpath.dirname(place), name)))
        if found is None:
            return text
        relative = posixpath.relpath(found, posixpath.dirname(uri) or ".")
        return f"{image}[{text}]({relative}{mark}{anchor})"

    def deeper(block):
        return re.sub(r"^", "  ", block[0], flags=re.MULTILINE) + "\n"

    return "".join(part if part.startswith("```") else
                   IN_ITEM.sub(deeper, LINK.sub(relinked, part)) for part in BLOCKS.split(markdown))

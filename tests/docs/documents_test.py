"""The documents: links lead somewhere, files that they name exist, and so do sections that the code cites.

    documents_test.py SOURCE-FOLDER
"""
import re
import sys
import unittest
from pathlib import Path

ROOT = Path(sys.argv.pop(1))
ROOMS = ["core", "mesh", "partition", "attention", "ring", "launcher", "tests", "examples",
         "benchmarks", "scripts", "cmake"]
CODE = {".hpp", ".cpp", ".cu", ".cuh", ".py", ".cmake", ".txt"}


def documents():
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"),
                   *(ROOT / "benchmarks").glob("*.md")])


def without_code(text):
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchors(path):
    """The anchors of a document's headings, as GitHub makes them."""
    found = set()
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for heading in re.findall(r"^#+ +(.*)$", text, flags=re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(words.replace(" ", "-"))
    return found


class Documents(unittest.TestCase):
    def test_links_lead_somewhere(self):
        count = 0
        for document in documents():
            for target in re.findall(r"\]\(([^)\s]+)\)", without_code(document.read_text())):
                if re.match(r"[a-z]+:", target):
                    continue
                count += 1
                name, _, anchor = target.partition("#")
                path = (document.parent / name).resolve() if name else document
                with self.subTest(document=document.name, target=target):
                    self.assertTrue(path.exists(), "no such file")
                    if anchor:
                        self.assertIn(anchor, anchors(path))
        self.assertGreater(count, 10)

    def test_files_named_in_the_text_exist(self):
        count = 0
        for name in "CONTRIBUTING.md", "docs/development.md":
            text = re.sub(r"```.*?```", "", (ROOT / name).read_text(), flags=re.DOTALL)
            for path in re.findall(rf"`((?:{'|'.join(ROOMS)}|python|docs)/[\w./]+)`", text):
                if any(part.isupper() for part in path.split("/")):  # the reader's own name
                    continue
                count += 1
                with self.subTest(document=name, path=path):
                    self.assertTrue((ROOT / path).exists(), "no such file")
        self.assertGreater(count, 30)

    def test_code_cites_sections_that_exist(self):
        semantics = (ROOT / "docs" / "semantics.md").read_text()
        sections = set(re.findall(r"^## (\d+)\.", semantics, flags=re.MULTILINE))
        self.assertGreater(len(sections), 4)
        cited = 0
        for room in ROOMS:
            for path in (ROOT / room).rglob("*"):
                if path.suffix not in CODE or not path.is_file() or path == Path(__file__).resolve():
                    continue
                # A comment may break a citation over two lines.
                text = re.sub(r"\s*\n\s*(///?|#)?\s*", " ", path.read_text(errors="replace"))
                for document, section in re.findall(r"([\w/.]*(?i:semantics)[\w.]*) §(\d+)", text):
                    cited += 1
                    with self.subTest(path=str(path.relative_to(ROOT)), section=section):
                        self.assertEqual(document, "docs/semantics.md")
                        self.assertIn(section, sections)
        self.assertGreater(cited, 5)


if __name__ == "__main__":
    unittest.main()

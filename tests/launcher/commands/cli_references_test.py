"""Results of JAX and ejkernel (tests/attention/references): the NumPy program that checks the other
tests agrees with them. Kernels are compared in tests/ring/references_test.cpp."""

import glob
import json
import os

import numpy as np

from cli_support import OPERANDS, CliTest, main, read_safetensors

CASES = os.path.join(os.path.dirname(__file__), "../../attention/references/cases")
OPERAND_NAMES = ["query", "key", "value"]


def names():
    return sorted(os.path.basename(path)[:-len(".json")] for path in glob.glob(f"{CASES}/*.json"))


class Case:
    """A fixture: see tests/attention/references/README.md."""

    def __init__(self, name):
        with open(f"{CASES}/{name}.json", encoding="utf-8") as file:
            description = json.load(file)
        self.file = f"{CASES}/{name}.safetensors"
        self.tensors = read_safetensors(self.file)
        self.options = description.get("options", {})
        self.differs = description.get("differs", {})

    def words(self):
        """The options of annulus run, except options that name files."""
        words = []
        for option, value in self.options.items():
            words.append(f"--{option}")
            if value is not True:
                words.append(",".join(map(str, value)) if isinstance(value, list) else str(value))
        return words

    def take_as_the_reference_did(self):
        """Changes options and tensors to the reference's."""
        changes = self.differs["equals_with"]
        self.options = {**self.options, **changes.get("options", {})}
        for name, other in changes.get("tensors", {}).items():
            tensor = self.tensors.pop(name)
            if other is not None:
                assert tensor is not self.tensors[other]
                self.tensors[name] = self.tensors[other]

    def empty_rows_as_ours(self):
        """Rows that see nothing become 0, with an LSE of −∞, as docs/semantics.md §8 says."""
        value = np.repeat(self.tensors["value"].mean(axis=1, keepdims=True),
                          self.tensors["query"].shape[2] // self.tensors["key"].shape[2], axis=2)
        output = self.tensors["output"]
        empty = np.all(np.abs(output - value) < 1e-6, axis=3, keepdims=True)
        self.tensors["output"] = np.where(empty, np.float32(0), output)
        if "lse" in self.tensors:
            lse = self.tensors["lse"]
            self.tensors["lse"] = np.where(lse < -2e38, np.float32(-np.inf), lse)


class Checker(CliTest):
    """scripts/check_attention.py agrees with the references."""

    def verdict(self, case):
        """The checker's exit code for the reference's results."""
        words = [*OPERANDS, "--output", "output.npy", *case.words()]
        for name, array in case.tensors.items():
            if name.endswith("_as_taken") or name == "lse" and "lse_rounded_to" in case.differs:
                continue
            self.save(f"{name}.npy", array)
            if name not in (*OPERAND_NAMES, "output"):
                words += ["--" + name.replace("_", "-"), f"{name}.npy"]
        code, output = self.checked(*words)
        self.assertIn(code, (0, 4), output)
        return code

    def test_agrees_with_every_reference(self):
        self.assertGreater(len(names()), 50)
        for name in names():
            with self.subTest(name):
                case = Case(name)
                if "empty_rows" in case.differs or "equals_with" in case.differs:
                    self.assertEqual(self.verdict(case), 4, "the reference does not differ")
                if "empty_rows" in case.differs:
                    case.empty_rows_as_ours()
                if "equals_with" in case.differs:
                    case.take_as_the_reference_did()
                self.assertEqual(self.verdict(case), 0)

    def test_gradients_without_any_to_check(self):
        self.save_operands()
        code, output = self.checked(*OPERANDS, "--output", "o.npy", "--grad-output", "query.npy")
        self.assertEqual((code, output), (2, "check_attention: --grad-output needs a gradient to "
                                          "check: --grad-query, --grad-key, --grad-value\n"))

    def test_notices_one_wrong_element(self):
        for name in ["jax_mask", "ejkernel_sinks_by_head", "jax_bias"]:
            with self.subTest(name):
                case = Case(name)
                case.tensors["output"] = case.tensors["output"].copy()
                case.tensors["output"][1, 7, 2, 3] += 1e-3
                self.assertEqual(self.verdict(case), 4)


if __name__ == "__main__":
    main()

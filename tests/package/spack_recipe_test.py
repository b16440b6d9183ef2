"""The Spack recipe against the build that it calls: the same versions, options that exist.

    spack_recipe_test.py SOURCE-FOLDER

Spack itself is not needed: its directives are stood in for by ones that only take notes.
"""

import re
import runpy
import sys
import types
import unittest
from pathlib import Path

ROOT = Path(sys.argv.pop(1))
RECIPE = ROOT / "packaging/spack/spack_repo/annulus/packages/annulus/package.py"

# Spack's names of what CMake looks for.
NAMES = {"MPI": "mpi", "fmt": "fmt", "spdlog": "spdlog", "nlohmann_json": "nlohmann-json",
         "Boost": "boost", "CUDAToolkit": "cuda", "NCCL": "nccl", "openblas": "openblas",
         "libhwy": "highway", "GTest": "googletest", "PkgConfig": "pkgconfig"}
LEFT_OUT = {"Threads", "benchmark", "CUDNN", "CudnnFrontend"}


def load():
    """The recipe's class, and what each directive was called with."""
    calls = {}

    def directive(name):
        return lambda *words, **options: calls.setdefault(name, []).append((words, options))

    class Package:
        def define(self, name, value):
            return f"{name}={value}"

        def define_from_variant(self, name, variant):
            return self.define(name, self.spec.satisfies("+" + variant))

    modules = {name: types.ModuleType(name) for name in
               ["spack", "spack.package", "spack_repo", "spack_repo.builtin",
                "spack_repo.builtin.build_systems", "spack_repo.builtin.build_systems.cmake",
                "spack_repo.builtin.build_systems.cuda"]}
    for name in ["conflicts", "depends_on", "license", "variant", "version"]:
        setattr(modules["spack.package"], name, directive(name))
    cmake = modules["spack_repo.builtin.build_systems.cmake"]
    cmake.CMakePackage, cmake.generator = Package, directive("generator")
    modules["spack_repo.builtin.build_systems.cuda"].CudaPackage = type("CudaPackage", (), {})
    sys.modules.update(modules)
    return runpy.run_path(str(RECIPE))["Annulus"], calls


class Spec:
    """A concrete spec: the variants that are on, and CUDA's architectures."""

    def __init__(self, on, architectures=("none",)):
        self.on = on
        self.variants = {"cuda_arch": types.SimpleNamespace(value=architectures)}

    def satisfies(self, text):
        return all((word[1:] in self.on) == (word[0] == "+") for word in text.split())


class Recipe(unittest.TestCase):
    def setUp(self):
        self.annulus, self.calls = load()

    def arguments(self, spec):
        package = self.annulus()
        package.spec, package.run_tests = spec, False
        return dict(argument.split("=", 1) for argument in package.cmake_args())

    def test_depends_on_what_cmake_looks_for(self):
        found = {}
        for file in ["AnnulusDependencies.cmake", "AnnulusCuda.cmake"]:
            text = (ROOT / "cmake" / file).read_text()
            found.update(re.findall(r"find_package\((\w+)(?: ([\d.]+))?", text))
            found.update((name, "") for name in
                         re.findall(r"pkg_check_modules\(.* (\w+)\)", text))
        self.assertLessEqual({"MPI", "openblas", "CUDAToolkit"}, set(found))
        wanted = {re.match(r"[\w-]+", words[0])[0]: words[0]
                  for words, _ in self.calls["depends_on"]}
        for name, version in found.items():
            if name in LEFT_OUT:
                continue
            with self.subTest(name):
                self.assertIn(NAMES[name], wanted)
                if version:
                    self.assertIn(f"@{version}:", wanted[NAMES[name]])

    def test_options_exist(self):
        text = "".join(file.read_text() for file in
                       [ROOT / "CMakeLists.txt", ROOT / "cmake/AnnulusCuda.cmake"])
        options = set(re.findall(r"\b(?:option|set)\((ANNULUS_\w+)", text))
        given = {*self.arguments(Spec({"program"})), *self.arguments(Spec({"cuda"}))}
        self.assertIn("ANNULUS_CUDA", given)
        self.assertLessEqual({name for name in given if name.startswith("ANNULUS_")}, options)

    def test_hopper_gets_its_own_instructions(self):
        given = self.arguments(Spec({"cuda", "nccl"}, ("80", "90")))
        self.assertEqual(given["CMAKE_CUDA_ARCHITECTURES"], "80;90a-real")
        self.assertNotIn("CMAKE_CUDA_ARCHITECTURES", self.arguments(Spec({"cuda", "nccl"})))

    def test_nccl_can_be_left_out(self):
        self.assertIn("CMAKE_DISABLE_FIND_PACKAGE_NCCL", self.arguments(Spec({"cuda"})))
        self.assertNotIn("CMAKE_DISABLE_FIND_PACKAGE_NCCL", self.arguments(Spec({"cuda", "nccl"})))

    def test_builds_the_sources_that_it_lies_in(self):
        self.assertEqual(self.annulus.git, ROOT.resolve().as_uri())


if __name__ == "__main__":
    unittest.main()

"""scripts/setup and scripts/test: what they ask CMake for, and when the headers that cuDNN needs are
fetched.

    setup_test.py SCRIPTS-FOLDER

Runs copies of the scripts among stand-ins for cmake, dpkg-query, nvidia-smi and get_cudnn_frontend.
"""
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SCRIPTS = Path(sys.argv.pop(1))
# The script finds out itself whether this machine has a GPU.
HAS_GPU = os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/dxg")

# Notes its arguments. Configuring leaves the cache that a test asked for, with the headers of
# cudnn-frontend in it once they were fetched.
CMAKE = """#!/usr/bin/env bash
echo "cmake $*" >> "$NOTES"
[[ $1 == --build ]] && exit 0
mkdir -p build
cuda=AUTO
for word in "$@"; do [[ $word == -DANNULUS_CUDA=* ]] && cuda=${word#*=}; done
{
  echo "ANNULUS_CUDA:STRING=$cuda"
  echo "$CACHE"
  if [[ -e fetched ]]; then echo "CudnnFrontend_INCLUDE_DIR:PATH=/here"
  else echo "CudnnFrontend_INCLUDE_DIR:PATH=CudnnFrontend_INCLUDE_DIR-NOTFOUND"; fi
} > build/CMakeCache.txt
"""
FETCH = """#!/usr/bin/env bash
echo "fetch" >> "$NOTES"
[[ -z $NO_NETWORK ]] || exit 3
touch fetched
"""
# Makes virtual environments whose pip notes what it is asked for.
PYTHON = """#!/usr/bin/env bash
[[ $2 == venv ]] || exit 0
[[ -z $NO_NETWORK ]] || exit 1
mkdir -p "$3/bin"
printf '#!/bin/sh\\necho "$@" > "$NOTES.pip"\\n' > "$3/bin/pip"
chmod +x "$3/bin/pip"
"""
CUDNN = "CUDNN_LIBRARY:FILEPATH=/lib/libcudnn.so\nCUDNN_INCLUDE_DIR:PATH=/include"
NO_CUDNN = "CUDNN_LIBRARY:FILEPATH=CUDNN_LIBRARY-NOTFOUND\nCUDNN_INCLUDE_DIR:PATH=/include"


class Setup(unittest.TestCase):
    def setUp(self):
        self.tree = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.tree)
        (self.tree / "scripts").mkdir()
        (self.tree / "bin").mkdir()
        for script in ["setup", "test", "mpi_environment"]:
            shutil.copy(SCRIPTS / script, self.tree / "scripts")
        self.program("scripts/get_cudnn_frontend", FETCH)
        self.program("bin/cmake", CMAKE)
        self.program("bin/ctest", '#!/bin/sh\necho "ctest $*" >> "$NOTES"\n')
        self.program("bin/python3", PYTHON)
        self.program("bin/dpkg-query", "#!/bin/sh\necho installed\n")
        self.program("bin/nvidia-smi", "#!/bin/sh\nexit 9\n")

    def program(self, name, text):
        path = self.tree / name
        path.write_text(text)
        path.chmod(0o755)

    def run_setup(self, *arguments, script="setup", cache=NO_CUDNN, no_network=""):
        """The result, and the calls that were noted."""
        notes = self.tree / "notes"
        notes.write_text("")
        environment = dict(os.environ, PATH=f"{self.tree / 'bin'}:{os.environ['PATH']}",
                           NOTES=str(notes), CACHE=cache, NO_NETWORK=no_network)
        result = subprocess.run([self.tree / "scripts" / script, *arguments], env=environment,
                                capture_output=True, text=True, check=False)
        return result, notes.read_text().splitlines()

    def test_configures_and_builds(self):
        result, calls = self.run_setup("--preset", "release", "--target=annulus", "--cuda", "off")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(calls[0], "cmake --preset release -DANNULUS_CUDA=OFF")
        self.assertEqual(calls[1], f"cmake --build --preset release --target annulus "
                                   f"--parallel {len(os.sched_getaffinity(0))}")
        self.assertEqual(len(calls), 2)

    def test_hands_options_on(self):
        _, calls = self.run_setup("--cuda=on", "--", "-DANNULUS_WERROR=ON", "-DX=a b")
        self.assertEqual(calls[0], "cmake --preset default -DANNULUS_CUDA=ON "
                                   "-DANNULUS_WERROR=ON -DX=a b")

    def test_installs_what_is_missing(self):
        self.program("bin/dpkg-query", "#!/bin/sh\n"
                     "case $3 in iproute2 | libfmt-dev) exit 1 ;; *) echo installed ;; esac\n")
        self.program("bin/apt-get", '#!/bin/sh\necho "apt-get $*" >> "$NOTES"\n')
        self.program("bin/sudo", "#!/bin/sh\nshift\nexec \"$@\"\n")
        result, calls = self.run_setup("--cuda", "off")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(calls[0], "apt-get update --quiet")
        self.assertRegex(calls[1], "^apt-get install .* libfmt-dev iproute2$")
        self.assertTrue(calls[2].startswith("cmake "))

    def test_refuses_what_it_does_not_know(self):
        for arguments in (["--fast"], ["--cuda", "maybe"], ["--preset", "none"], ["--target"]):
            result, calls = self.run_setup(*arguments)
            self.assertEqual(result.returncode, 2, arguments)
            self.assertIn("usage:", result.stderr)
            self.assertEqual(calls, [])

    @unittest.skipIf(HAS_GPU, "this machine has a GPU")
    def test_without_a_gpu_a_new_build_is_for_the_cpu(self):
        for script in ("setup", "test"):
            (self.tree / "build/CMakeCache.txt").unlink(missing_ok=True)
            _, calls = self.run_setup(script=script)
            self.assertEqual(calls[0], "cmake --preset default -DANNULUS_CUDA=OFF")

    def test_with_a_gpu_a_new_build_is_for_it(self):
        self.program("bin/nvidia-smi", "#!/bin/sh\nexit 0\n")
        for script in ("setup", "test"):
            (self.tree / "build/CMakeCache.txt").unlink(missing_ok=True)
            _, calls = self.run_setup(script=script)
            self.assertEqual(calls[0], "cmake --preset default -DANNULUS_CUDA=AUTO")

    def test_a_gpu_without_a_compiler_is_said(self):
        self.program("bin/nvidia-smi", "#!/bin/sh\nexit 0\n")
        result, _ = self.run_setup()
        self.assertIn("WARNING: this machine has a GPU, but CMake found no CUDA compiler",
                      result.stderr)
        result, _ = self.run_setup(cache="ANNULUS_NVCC:FILEPATH=/usr/local/cuda/bin/nvcc")
        self.assertNotIn("WARNING", result.stderr)
        result, _ = self.run_setup("--cuda", "off")
        self.assertNotIn("WARNING", result.stderr)

    def test_a_build_keeps_what_it_was_configured_with(self):
        self.run_setup("--cuda", "on")
        _, calls = self.run_setup()
        self.assertEqual(calls[0], "cmake --preset default")

    def test_tests_keep_what_a_build_was_configured_with(self):
        self.run_setup("--cuda", "off")
        result, calls = self.run_setup("-L", "unit", script="test")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(calls[0], "cmake --preset default")
        self.assertRegex(calls[-1], "^ctest --preset default .*-L unit$")

    def test_tests_install_what_the_python_package_needs(self):
        result, _ = self.run_setup(script="test")
        self.assertEqual(result.returncode, 0, result.stderr)
        pip = self.tree / "notes.pip"
        self.assertIn("mpi4py", pip.read_text().split())
        self.assertNotIn("torch", pip.read_text().split())
        _, calls = self.run_setup("--torch", "-L", "unit", script="test")
        self.assertIn("torch", pip.read_text().split())
        self.assertNotIn("--torch", calls[-1])

    def test_tests_run_without_a_network(self):
        result, calls = self.run_setup(script="test", no_network="1")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("WARNING", result.stderr)
        self.assertRegex(calls[-1], "^ctest")

    def test_fetches_headers_once_for_cudnn(self):
        result, calls = self.run_setup("--cuda", "auto", cache=CUDNN)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual([call.split()[0] for call in calls], ["cmake", "fetch", "cmake", "cmake"])
        _, calls = self.run_setup("--cuda", "auto", cache=CUDNN)
        self.assertNotIn("fetch", calls)

    def test_fetches_nothing_without_cudnn_or_cuda(self):
        _, calls = self.run_setup("--cuda", "auto")
        self.assertNotIn("fetch", calls)
        _, calls = self.run_setup("--cuda", "off", cache=CUDNN)
        self.assertNotIn("fetch", calls)

    def test_goes_on_without_the_headers_and_says_so(self):
        result, calls = self.run_setup("--cuda", "auto", cache=CUDNN, no_network="1")
        self.assertEqual(result.returncode, 0)
        self.assertIn("WARNING: without these headers cuDNN is left out", result.stderr)
        self.assertIn("--build", calls[-1])


if __name__ == "__main__":
    unittest.main()

"""Runs the program as its users do, for the cli_*_test.py beside this file.

The environment says what to run: ANNULUS_TEST_PROGRAM, ANNULUS_TEST_MPIEXEC (with its flags up to the
number of ranks) and ANNULUS_TEST_CHECKER, the independent NumPy check.
"""

import contextlib
import io
import json
import os
import resource
import shlex
import struct
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock

import numpy as np

PROGRAM = os.environ.pop("ANNULUS_TEST_PROGRAM")
MPIEXEC = shlex.split(os.environ.pop("ANNULUS_TEST_MPIEXEC"))
CHECKER = os.environ.pop("ANNULUS_TEST_CHECKER")
TIMEOUT = 240  # seconds; machines may be busy

sys.path.append(os.path.dirname(CHECKER))
import check_attention


def command(*words, ranks=None):
    """The words that run annulus on its own, or under mpirun if `ranks` is given."""
    words = [str(word) for word in words]
    return [PROGRAM, *words] if ranks is None else [*MPIEXEC, str(ranks), PROGRAM, *words]


def command_on_nodes(*words, nodes):
    """The words that run annulus with a rank on each of `nodes`, which are pretended; NCCL takes
    them for hosts."""
    parts = []
    for node in nodes:
        parts += [":", "-n", "1", "-x", f"ANNULUS_NODE={node}", "-x", f"NCCL_HOSTID={node}",
                  PROGRAM, *map(str, words)]
    return [*MPIEXEC[:-1], *parts[1:]]


def safetensors_bytes(tensors):
    """A .safetensors file of NumPy arrays; uint16 is taken as bfloat16."""
    names = {"float32": "F32", "float16": "F16", "uint16": "BF16", "int32": "I32", "uint8": "U8",
             "float64": "F64", "bool": "BOOL"}
    header, data = {}, b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": names[array.dtype.name], "shape": list(array.shape),
                        "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def read_safetensors(path):
    """The tensors of a .safetensors file as NumPy arrays; bfloat16 comes as its bits, uint16."""
    names = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<i4", "BOOL": "?"}
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        data = file.read()
    header.pop("__metadata__", None)
    return {name: np.frombuffer(data[slice(*entry["data_offsets"])],
                                names[entry["dtype"]]).reshape(entry["shape"])
            for name, entry in header.items()}


def as_bfloat16(array):
    """Bits of the nearest bfloat16 values (finite input)."""
    bits = array.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def as_float16(array):
    return array.astype(np.float16)


def ranks_of(mpirun):
    """Process ids of the program's ranks that the process `mpirun` has started, by rank."""
    found = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat") as file:
                parent = int(file.read().rsplit(")", 1)[1].split()[1])
            if parent != mpirun:
                continue
            if os.path.realpath(f"/proc/{entry}/exe") != os.path.realpath(PROGRAM):
                continue
            with open(f"/proc/{entry}/environ", "rb") as file:
                variables = dict(item.split(b"=", 1) for item in file.read().split(b"\0") if item)
            found[int(variables[b"OMPI_COMM_WORLD_RANK"])] = int(entry)
        except (OSError, KeyError):
            continue  # gone, or not there yet
    return found


def holds_temporary(process, directory):
    """How many files in `directory` a process has open that have a temporary name, or none yet."""
    count = 0
    try:
        for entry in os.listdir(f"/proc/{process}/fd"):
            path = os.readlink(f"/proc/{process}/fd/{entry}")
            if path.startswith(os.path.realpath(directory) + "/"):
                count += path.endswith((" (deleted)", ".tmp"))
    except OSError:
        pass  # gone
    return count


OPERANDS = ["--query", "query.npy", "--key", "key.npy", "--value", "value.npy"]
OUTPUT = ["--output", "output.npy"]


class CliTest(unittest.TestCase):
    """Runs in a directory of its own."""

    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.directory = holder.name

    def path(self, name):
        return os.path.join(self.directory, name)

    def annulus(self, *words, ranks=None, environment=None, **arguments):
        """Runs the program to its end; standard output and error come as text."""
        return self.execute(command(*words, ranks=ranks), environment, **arguments)

    def start(self, words, stdout=subprocess.PIPE, **arguments):
        """A job whose messages come as text."""
        return subprocess.Popen(words, cwd=self.directory, stdout=stdout, stderr=subprocess.PIPE, text=True,
                                **arguments)

    def wait_for(self, condition, seconds, what=lambda: "", pause=0.05):
        """Waits until condition() holds. Fails after so many seconds, with the message what()."""
        deadline = time.monotonic() + seconds
        while not condition():
            self.assertLess(time.monotonic(), deadline, what())
            time.sleep(pause)

    @contextlib.contextmanager
    def within(self, seconds):
        """Programs that run here must take less processor time, however busy the machine is."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        yield
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.assertLess(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, seconds)

    def execute(self, words, environment=None, **arguments):
        # Tests that mean GPUs say so; the others mean the CPU, on machines with GPUs too.
        environment = {**os.environ, "ANNULUS_DEVICE": "cpu", **(environment or {})}
        return subprocess.run(words, cwd=self.directory, env=environment,
                              capture_output=True, text=True, timeout=TIMEOUT, **arguments)

    def errors_of(self, result):
        return [line for line in result.stderr.splitlines() if "annulus: error: " in line]

    def expect_success(self, result):
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result

    def succeed(self, *words, **arguments):
        """A run of the program that succeeds."""
        return self.expect_success(self.annulus(*words, **arguments))

    def expect_error(self, result, code, *texts):
        """One message with all `texts`, and the exit code."""
        self.assertEqual(result.returncode, code, result.stdout + result.stderr)
        errors = self.errors_of(result)
        self.assertEqual(len(errors), 1, result.stderr)
        for text in texts:
            self.assertIn(text, errors[0])

    def expect_no_files(self, *names):
        """Neither files of these names nor temporary ones."""
        for left in os.listdir(self.directory):
            self.assertNotIn(left, names)
            self.assertFalse(left.endswith(".tmp"), left)

    def random(self, *shape, seed=0):
        return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)

    def save(self, name, array):
        np.save(self.path(name), array)
        return name

    def save_operands(self, batch=1, rows=64, columns=None, heads=4, kv_heads=2, dim=16,
                      value_dim=None, bhtd=False, convert=lambda array: array):
        """query.npy, key.npy and value.npy of random numbers."""
        columns = rows if columns is None else columns
        shapes = {"query": (batch, rows, heads, dim), "key": (batch, columns, kv_heads, dim),
                  "value": (batch, columns, kv_heads, value_dim or dim)}
        operands = {}
        for seed, (name, shape) in enumerate(shapes.items()):
            array = self.random(*shape, seed=seed)
            array = convert(array.transpose(0, 2, 1, 3).copy() if bhtd else array)
            operands[name] = array
            self.save(name + ".npy", array)
        return operands

    def check(self, meaning=(), ranks=None, files=(*OPERANDS, *OUTPUT, "--lse", "lse.npy"), how=()):
        """annulus run with options that decide what is computed (`meaning`, which the checker gets
        too), how, and from and to which `files`."""
        self.expect_success(self.annulus("run", *files, *meaning, *how, ranks=ranks))
        self.expect_right_files(files, meaning)

    def checked(self, *words):
        """The exit code of the NumPy program that checks files, and its output."""
        output, before = io.StringIO(), os.getcwd()
        os.chdir(self.directory)
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), \
                    unittest.mock.patch.object(sys, "argv", [CHECKER, *map(str, words)]):
                code = check_attention.main()
        except SystemExit as end:
            code = end.code
        finally:
            os.chdir(before)
        return code, output.getvalue()

    def expect_right_files(self, files, meaning=()):
        """The checker finds that the files of a run are right, and there are no temporary ones."""
        self.expect_no_files()
        code, output = self.checked(*files, *meaning)
        self.assertEqual(code, 0, output)

    def json(self, *words, **arguments):
        """The JSON that the program prints."""
        return json.loads(self.succeed(*words, "--json", "-", **arguments).stdout)

    def read(self, name):
        with open(self.path(name), "rb") as file:
            return file.read()

    def write(self, name, data):
        with open(self.path(name), "wb") as file:
            file.write(data)
        return name

    def load_json(self, name):
        return json.loads(self.read(name))

    def save_safetensors(self, name, tensors):
        return self.write(name, safetensors_bytes(tensors))


def main():
    unittest.main(argv=sys.argv, verbosity=2)

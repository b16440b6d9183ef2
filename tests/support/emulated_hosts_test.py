"""Where hosts cannot be emulated, a test is skipped, unless it is required to run."""

import os
import subprocess
import sys
import unittest

import emulated_hosts


class WithoutNamespaces(unittest.TestCase):
    def run_it(self, **environment):
        """On a machine that has not even the command."""
        return subprocess.run(
            [sys.executable, "-c", "import emulated_hosts; emulated_hosts.enter_namespaces()"],
            env={"PYTHONPATH": os.path.dirname(emulated_hosts.__file__), "PATH": "/nonexistent",
                 "PYTHONDONTWRITEBYTECODE": "1", **environment},
            capture_output=True, text=True, timeout=60)

    def test_skipped(self):
        for environment in [{}, {emulated_hosts.REQUIRED: "0"}]:
            result = self.run_it(**environment)
            self.assertEqual(result.returncode, emulated_hosts.SKIPPED, result.stderr)
            self.assertIn("skipped: hosts cannot be emulated here", result.stdout)
            self.assertIn("unshare", result.stdout)

    def test_required(self):
        result = self.run_it(ANNULUS_TEST_REQUIRE_HOSTS="1")
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertIn("failed: hosts cannot be emulated here, and ANNULUS_TEST_REQUIRE_HOSTS=1",
                      result.stdout)


if __name__ == "__main__":
    unittest.main()

"""The line that long work shows on a terminal, and nowhere else."""

import os
import pty
import re
import subprocess
import threading

from cli_support import OPERANDS, OUTPUT, TIMEOUT, CliTest, command, main

LINE = re.compile(r"\rannulus: ([^\r\n\x1b]*)\x1b\[K\r")
WIPED = "\r\x1b[K"


class Terminal(CliTest):
    def on_terminal(self, words):
        """Runs to the end with a terminal as standard error; what that showed, and standard output."""
        master, slave = pty.openpty()
        shown = []

        def read():
            try:
                while text := os.read(master, 4096):
                    shown.append(text)
            except OSError:
                pass  # the program is gone, and with it the terminal's other end

        reader = threading.Thread(target=read)
        try:
            process = subprocess.Popen(words, cwd=self.directory, stdout=subprocess.PIPE, stderr=slave,
                                       stdin=subprocess.DEVNULL, text=True)
        finally:
            os.close(slave)
        reader.start()
        output, _ = process.communicate(timeout=TIMEOUT)
        reader.join(timeout=TIMEOUT)
        os.close(master)
        text = b"".join(shown).decode()
        self.assertEqual(process.returncode, 0, output + text)
        return text, output

    def long_enough(self, pattern, words_for, sizes):
        """The output of the smallest size that takes so long that the pattern is found three times, and the finds.

        How long a size takes is the machine's affair, and short work shows nothing.
        """
        for size in sizes:
            shown, output = self.on_terminal(words_for(size))
            found = re.findall(pattern, " ".join(LINE.findall(shown)))
            if len(found) > 2:
                return shown, output, found
        self.fail(f"{pattern!r} found {len(found)} times: {shown!r}")

    def test_verify_shows_the_oracle(self):
        for ranks in None, 2:
            with self.subTest(ranks=ranks):
                shown, output, found = self.long_enough(
                    r"oracle, (\d+) %",
                    lambda rows, ranks=ranks: command("verify", "--shape", f"1,{rows},{rows},4,2,64", ranks=ranks),
                    (2048, 4096, 8192, 16384))
                parts = [int(part) for part in found]
                self.assertEqual(parts, sorted(parts))
                self.assertLess(parts[0], parts[-1])
                self.assertTrue(shown.endswith(WIPED), repr(shown[-80:]))
                self.assertNotIn("\n", shown)
                self.assertIn("# Verdict: OK", output)
                self.assertNotIn("\x1b", output)

    def test_random_problems_are_counted(self):
        _, output, found = self.long_enough(
            r"problem (\d+) of (\d+) \(--random-case \d+:\d+\), \d+ %", lambda count: command("verify", "--random", str(count), ranks=4),
            (600, 2400, 9600))
        shown = [int(number) for number, _ in found]
        self.assertEqual(shown, sorted(shown))
        (count,) = {int(count) for _, count in found}
        self.assertLessEqual(shown[-1], count)
        self.assertEqual(sum(not line.startswith("#") for line in output.splitlines()), count)

    def test_run(self):
        self.save_operands(rows=16384, heads=4, kv_heads=2, dim=64)
        words = command("run", *OPERANDS, *OUTPUT, "--threads", "1", "--schedule", "ring", ranks=4)
        shown, output = self.on_terminal(words)
        lines = " ".join(LINE.findall(shown))
        self.assertRegex(lines, r"attention, \d+ %")
        self.assertIn("GFLOP/s", output)

    def test_nothing_in_pipes_and_logs(self):
        words = ["verify", "--shape", "1,2048,2048,4,2,64"]
        for ranks in None, 2:
            with self.subTest(ranks=ranks):
                result = self.succeed(*words, ranks=ranks)
                self.assertNotIn("\x1b", result.stderr + result.stdout)
                self.assertNotIn("oracle,", result.stderr)
                with open(self.path("log"), "w+") as log:
                    subprocess.run(command(*words, ranks=ranks), cwd=self.directory, stderr=log,
                                   stdout=subprocess.DEVNULL, timeout=TIMEOUT, check=True)
                    log.seek(0)
                    self.assertNotIn("oracle,", log.read())


if __name__ == "__main__":
    main()

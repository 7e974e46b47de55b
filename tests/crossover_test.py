# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""bench/crossover.py and bench/errors.py on documents whose answer is known."""

import os
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "bench"))
import crossover  # noqa: E402
import errors  # noqa: E402

ROW = 4096 * 2  # bytes


def result(n_tokens, algorithm, seconds, ranks=4, hidden=4096, devices=4):
    how = f" algorithm={algorithm}" if algorithm else " max_tokens=4096"
    return {
        "case": f"allreduce_rmsnorm name=crossover how=graph T={n_tokens} H={hidden}{how}",
        "plan": f"allreduce_rmsnorm H={hidden} max_tokens={4096 if not algorithm else n_tokens} "
                f"algorithm={algorithm or 'auto one_shot_rows=117'} P={ranks}",
        "ranks": ranks, "devices": devices, "median_s": seconds,
    }


def document(results):
    return {"date": "2026-12-01T00:00:00Z", "version": "0.1.0", "results": results,
            "machine": {"cpu": "a cpu", "gpus": 4, "gpu": "a gpu"}}


def law(sizes, one, two):
    """Results of both algorithms at these T."""
    return [result(t, name, f(t)) for t in sizes for name, f in (("one_shot", one),
                                                                 ("two_shot", two))]


class Crossover(unittest.TestCase):
    def test_power_laws_cross_where_they_do(self):
        # T^1 and 10 T^0.5 are equal at T = 100, whichever sizes are measured around it.
        results = law((1, 4, 16, 64, 128, 256), lambda t: 1e-6 * t, lambda t: 1e-5 * t**0.5)
        row_bytes, medians, default = crossover.groups_of(document(results))[4, 4, 4096, "bf16"]
        points = [(t * row_bytes, m["one_shot"], m["two_shot"]) for t, m in medians.items()]
        found = crossover.crossings(points)
        self.assertEqual(len(found), 1)
        self.assertAlmostEqual(found[0] / (100 * ROW), 1, places=9)
        self.assertIsNone(default)
        text = crossover.text_of(document(results))
        self.assertIn("One-shot is faster below 819200 bytes (100.0 rows), the other above.", text)
        self.assertIn("No plan tells its default.", text)
        self.assertIn("| 64 | 524288 | 64.00 | 80.00 | 1.25 |", text)
        self.assertIn("4 x a gpu; cofuse 0.1.0, 2026-12-01.", text)

    def test_never(self):
        text = crossover.text_of(document(law((1, 8), lambda t: 1e-6, lambda t: 2e-6)))
        self.assertIn("One-shot is faster at every size from 8192 to 65536 bytes.", text)
        text = crossover.text_of(document(law((1, 8), lambda t: 2e-6, lambda t: 1e-6)))
        self.assertIn("Two-shot is faster at every size from 8192 to 65536 bytes.", text)

    def test_noise_crosses_more_than_once(self):
        times = {1: (1, 2), 2: (2, 1), 4: (1, 2), 8: (2, 1)}
        text = crossover.text_of(document(
            law(times, lambda t: times[t][0] * 1e-6, lambda t: times[t][1] * 1e-6)))
        self.assertIn("They cross 3 times: 11585 bytes (1.4 rows), 23170 bytes (2.8 rows), "
                      "46341 bytes (5.7 rows)", text)

    def test_the_other_way_round(self):
        text = crossover.text_of(document(law((1, 4), lambda t: 2e-6, lambda t: t * 1e-6)))
        self.assertIn("Two-shot is faster below 16384 bytes (2.0 rows), the other above.", text)

    def test_a_tie_is_two_shots(self):
        text = crossover.text_of(document(law((1, 4), lambda t: t * 1e-6, lambda t: 4e-6)))
        self.assertIn("One-shot is faster below 32768 bytes (4.0 rows), the other above.", text)

    def test_missing_size(self):
        results = law((1, 16), lambda t: t * 1e-6, lambda t: 4e-6) + [result(4, "one_shot", 5e-6)]
        text = crossover.text_of(document(results))
        self.assertIn("| 4 | 32768 | 5.00 | - | - |", text)
        self.assertIn("faster below 32768 bytes (4.0 rows)", text)
        self.assertIn("No size has both.", crossover.text_of(document(results[-1:])))

    def test_groups_and_defaults(self):
        results = law((1, 8), lambda t: t * 1e-6, lambda t: 2e-6)
        results += [result(1, None, 1e-6),
                    result(1, "one_shot", 3e-6, ranks=2, devices=1, hidden=8192)]
        text = crossover.text_of(document(results))
        self.assertIn("Default: one-shot up to 117 rows, 958464 bytes.", text)
        self.assertIn("2 ranks on 1 devices, which share them, H = 8192:", text)
        self.assertIn("4 ranks on 4 devices, H = 4096:", text)
        self.assertLess(text.index("2 ranks"), text.index("4 ranks"))
        results[-2]["plan"] = results[-2]["plan"].replace("=117", "=all")
        self.assertIn("one-shot at every size, up to max_tokens = 4096",
                      crossover.text_of(document(results)))

    def test_types_apart(self):
        both = [result(1, "one_shot", 1e-6), result(1, "two_shot", 2e-6)]
        others = [result(1, "one_shot", 9e-6), result(1, "two_shot", 3e-6)]
        for other in others:
            other["case"] += " dtype=f32"
        text = crossover.text_of(document(both + others))
        self.assertIn("| 1 | 8192 | 1.00 | 2.00 |", text)
        self.assertIn("| 1 | 16384 | 9.00 | 3.00 |", text)
        self.assertIn("H = 4096, f32:", text)

    def test_nothing_to_tell(self):
        self.assertIsNone(crossover.text_of(document([])))
        self.assertIsNone(crossover.text_of(document([result(1, None, 1e-6)])))
        others = [result(1, "one_shot", 1e-6) for _ in range(3)]
        others[0]["case"] += " variant=only"
        others[1]["case"] = others[1]["case"].replace("how=graph", "how=eager")
        others[2]["case"] = others[2]["case"].replace("allreduce_rmsnorm", "grad_return")
        self.assertIsNone(crossover.text_of(document(others)))


class Errors(unittest.TestCase):
    def test_table(self):
        def case(n_tokens, verdict, text):
            return {"case": f"allreduce_rmsnorm t={n_tokens} published_error=0.03125",
                    "ranks": 4, "verdict": verdict, "text": text}

        cases = [case("1", "passed", "max 0.0206<=0.03125"),
                 case("1:16", "failed", "max error 0.5 OVER 0.03125"),
                 case("64", "failed", "the run itself failed"),
                 {"case": "allreduce_rmsnorm t=3", "ranks": 4, "verdict": "passed", "text": ""}]
        whole = dict(document([]), cases=cases)
        text = errors.text_of(whole)
        self.assertIn("| 1 | 4 | 0.0206 | 0.03125 | passed |", text)
        self.assertIn("| 1, 16 | 4 | 0.5 | 0.03125 | failed |", text)
        self.assertIn("| 64 | 4 | - | 0.03125 | failed |", text)
        self.assertEqual(text.count("\n"), 6)
        self.assertIsNone(errors.text_of(dict(whole, cases=cases[3:])))


if __name__ == "__main__":
    unittest.main()

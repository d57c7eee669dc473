import unittest

from basket import Line, total


class Total(unittest.TestCase):
    def test_of_nothing(self):
        self.assertEqual(total([]), 0)

    def test_pieces(self):
        self.assertEqual(total([Line("pear", 30, pieces=4)]), 120)

    def test_discount(self):
        self.assertEqual(total([Line("bread", 250, discount=10), Line("salt", 99)]), 324)


if __name__ == "__main__":
    unittest.main()

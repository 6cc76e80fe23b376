"""Text to measure on, written for this purpose."""

from __future__ import annotations

from typing import Protocol


class Tokenizer(Protocol):
    def tokenize(self, text: bytes, add_bos: bool = ..., special: bool = ...) -> list[int]: ...


PROSE = """\
The ferry leaves the old harbour at a quarter past six, before the bakeries open and after the last of the night buses
has gone to sleep behind the market hall. In winter it carries mostly people who know each other by their coats. They
stand on the side away from the wind, hold their cups with both hands, and say nothing until the lighthouse has been
passed, because somebody decided long ago that the day begins there. The captain's daughter sells the tickets. She is
writing a thesis about river ice, and on some mornings she asks a passenger to hold the end of a measuring line.

Halfway across, the water changes its colour. The river brings down clay from the hills and the sea will not take it
in at once, so for a few hundred metres there is a seam, brown on one side and green on the other, and the gulls work
along it like people at a counter. An engineer once explained that the seam moves with the tide and with the rain of
the week before, and that one could read the weather of the hills from it if one had patience. Nobody has had enough
so far, but three notebooks with drawings of the seam hang from a nail beside the life jackets, and anyone may add a
page. The oldest entry says that the water was the colour of tea and that the dog did not trust it.

On the far side there is a pump house, a row of allotments, and a school whose pupils come over by the same ferry in
the other direction. The teacher counts them on the pier, then on the boat, then on the pier again, and writes the
three numbers on her hand. Once they did not agree, and the whole village searched for a boy who had been asleep under
the bench in the wheel house. Since then the captain looks under the bench. It takes him no time at all, he says, and
it is the part of the crossing in which he feels most useful.

In the evening the same people return, and now they talk. They trade seedlings, opinions, and the phone number of the
only plumber who comes over in bad weather. The price of a crossing has not changed for eleven years. There was a plan
for a bridge, drawn by a firm from the capital, with lamps and a path for bicycles, and for one summer a large sign
stood at the landing and showed how it would look. A storm took the sign in October. It was found weeks later beside
the seam, floating picture upwards, and it serves the allotments as the roof of a shed.
"""


def tokens(llm: Tokenizer, n: int) -> list[int]:
    """n tokens of the text, repeated as often as it takes."""
    once = llm.tokenize(PROSE.encode(), add_bos=False, special=False)
    return (once * -(-n // len(once)))[:n]

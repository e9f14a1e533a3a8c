"""English prose of our own for prompts: more than 2,100 tokens of the tiny tokenizer, no sentence repeated."""

from __future__ import annotations

FERRY = """
The ferry between Holm and the outer islands left at six, before the bakery opened and long before the schoolmaster
woke. It carried post, two crates of oranges, a piano that nobody had asked for, and Marta Lind, who had been told that
the crossing took an hour and was now in her third. The captain apologised without turning round. "The fog does what it
likes," he said, "and I do what I can. Between us we always arrive."

She counted the things she knew about fog. It forms when warm, wet air moves over cold water. It swallows high notes and
lets low ones through, which is why a horn is built like a cow and not like a sparrow. It makes every distance equal. Her
grandfather, who had kept the light at Skerry Point for thirty-one years, used to say that a keeper's work was mostly
arithmetic: so many litres of oil, so many turns of the clockwork, so many ships that never knew they had been in danger.
He wrote it all down in green notebooks, one for each winter, and when he died the notebooks went to a museum that had no
room for them, then to an attic, then to her.

Now they lay in the suitcase between her feet. Forty notebooks weigh about as much as a small dog. She had read nine. The
first was all weather; the second was weather and birds; in the third a woman appeared, without a name, who came on
Thursdays with bread and stayed to argue about politics. By the seventh winter she had a name, and by the ninth she was
Marta's grandmother. Nothing in the writing changed. The wind was still north by northwest, the barometer still fell. But
the entries for Thursdays had grown longer than those for storms.

"What will you do with them?" asked the captain, when she had explained the suitcase.

"Put them back. There's a shelf in the lamp room. He built it himself, exactly forty notebooks wide, and then he lived
one winter longer than the shelf."

"Forty-one, then."

"The last one is missing. That's the other reason I'm here."

The captain slowed the engine until it only muttered. Somewhere ahead a bell was ringing, unevenly, the way bells do when
the sea is the one who rings them. He listened with his head tilted, moved the wheel by the width of a hand, and the bell
went from left to right like something being carried past a window. "Gull Rock," he said. "If you hear it on the wrong
side you have time for one short prayer. My mother's was four words. Mine has a few more, but I talk faster."

At the quay there were three people and a goat. One of the people took the post, one took the oranges, and the third, a
boy of about twelve with a coil of rope over his shoulder, looked at the piano and then at the hill. "It came on the
wrong boat," said the captain. "It always does. Leave it under the tarpaulin, and on Sunday we'll have a concert." Then he
showed Marta the path: up past the chapel, left at the wall, and on until there was no more island.

The lighthouse had been automatic since 1987. A lamp no larger than a fist did what had once taken a lens of two tonnes
floating in a bath of mercury. A computer in another country switched it on, asked it each night whether it was well, and
made a note of the answer. The door was locked, but the boy, who had followed her at a distance that he must have thought
was polite, knew where the key hung. "Everybody knows," he said. "It's only locked against the wind."

Inside, the stairs went round and round in the smell of old paint. There were one hundred and eight of them; she knew
that from winter four. The lamp room was bright even in fog, as if the glass remembered. And there was the shelf, empty,
dusted, a little crooked on the left. Marta opened the suitcase and began: one, two, three. The boy handed her the
notebooks in order, reading the years aloud. At nineteen they rested. At twenty-six it started to rain, and the windows
ran. When the fortieth was in its place the row was tight and straight, and one could see that he had been right about
the width to within the thickness of a cover.

"So where's the last?" asked the boy.

She had thought about that for most of a year. A careful man with a full shelf does not start another shelf at eighty; he
finds a place that is already there. She looked for a gap between the boards, a loose stone, a tin. She looked in the
case of the clockwork, where mice had kept a winter of their own. She sat on the floor at last, with her back to the
lens's iron foot, and from there, at the height of a man who sits because his knees hurt, she saw it: on the underside of
the shelf two strips of wood, and between them, flat against the board, something green.

It was thinner than the rest. He had written the date, the wind, the barometer. "Fog since Tuesday," said the first page.
"Horn every ninety seconds. Nobody can see the light, and I keep it burning, because somebody may be just about to." And
below, in a different ink: "Thursday. She would have said that this is no reason. I would have said that it is the only
one. We'd have gone on until the bread was eaten."

Marta read it to the end, which took as long as the rain did. Then she put the notebook back where she had found it, in
its own place, and let the boy lock the door against the wind.

How the horn worked, for those who ask: an engine of nine horsepower filled two iron tanks with air at four atmospheres; a
drum with slots turned in front of the trumpet, and every slot let out one blast of six seconds. The mechanism needed 14
drops of oil a day, a new leather washer each March, and a keeper who could sleep through it but wake when it stopped. In
1952 the average night had 3.7 hours of fog; the worst, in the second week of November, had 71 hours without a break. The
notebook of that week contains a recipe for barley soup, a proof that the square root of two cannot be a fraction, and the
sentence: "If anyone asks, I was here."

On Sunday there was a concert. The piano was out of tune by nearly half a tone, all of it equally, so that only the
schoolmaster suffered. They played what they knew: two hymns, a march, a song about herring with eleven verses. The goat
was asked to leave and did not. When the evening boat blew its whistle the captain lifted his cap to the hill, as he
always had, although nobody had stood up there for forty years; and from the top of the hill, one, two, three, pause, the
light answered. It would have done so anyway. It was, after all, that time of night.
"""

KITCHEN = """
Notes for whoever cooks next. The left burner runs hot, the oven runs cold by about fifteen degrees, and the timer on the
wall counts minutes of fifty-five seconds. Soak the beans the night before, even if the packet says otherwise. Salt the
water for pasta until it tastes like a mild sea; salt the water for potatoes from the start; never salt the mushrooms until
they have given up. Bread wants less flour than you think and more time. If a sauce breaks, take it off the heat, add a
spoon of cold water, and stir as though nothing had happened. Knives are sharpened on the first of the month. Whoever
uses the last egg writes "eggs" on the board, in letters that the rest of us can read.
"""

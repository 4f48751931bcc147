"""Prompts of a wanted length for a server whose tokenizer is unknown: random words, counted by asking the server once.

A prompt has as many words as the tokens that it needs, by the mean of tokens a word. So single prompts are a few
percent longer or shorter; the server's count of each is in its `usage`. With a tokenizer they are exact.
"""

import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ktqueue.bench.serving.http_client import RequestFailure

_COMMON_WORDS = """
able above across action after again against air almost alone along already also always among animal another answer
apple area around art ask away baby back bad ball bank base bear beautiful because bed before begin behind believe
best better between big bird black blood blue board boat body book both bottom box boy bread break bridge bright bring
brother brown build business buy call can capital car care carry case catch cause center certain chair change check
child children choose church circle city class clean clear close cold color come common company complete consider
contain control cook cool copy corn corner cost could country course cover cross cry current cut dance dark daughter
day dead deal death decide deep develop die different direct discover distance doctor dog dollar door double down draw
dream dress drink drive drop dry during each early earth east easy eat edge effect egg eight either end enemy energy
engine enough enter equal even evening event ever every example experience eye face fact fall family famous far farm
fast father fear feel feet field fight figure fill final find fine finger finish fire first fish five floor flow
flower fly follow food foot force forest form forward four free fresh friend front fruit full game garden gave general
gentle get girl give glass go gold gone good govern grand grass gray great green ground group grow guess guide hair
half hand happen happy hard hat head hear heart heat heavy height help high hill history hold hole home hope horse hot
hour house huge human hundred hunt ice idea imagine inch interest iron island job join jump just keep key kill kind
king knew know lady lake land language large last late laugh law lay lead learn leave left leg length less letter
level lie life lift light like line list listen little live local long look lost love low machine main make man many
map mark market master matter mean measure meat meet member metal method middle might mile milk million mind mine
minute miss mix modern moment money month moon morning mother motion mountain mouth move much music must name nation
nature near need never new next night nine noise north nose note nothing notice noun now number object ocean off offer
office often oil old once open operate opposite orange order organ original other over own page paint pair paper
parent part party pass past path pattern pay people perhaps period person picture piece place plain plan plane planet
plant play please point poor position possible pound power practice prepare present press pretty print probable
problem process produce product property protect prove provide pull push put question quick quiet quite race radio
rain raise range rather reach read ready real reason receive record red region remember repeat reply report represent
require rest result return rich ride right ring rise river road rock roll room root rope rose round row rule run safe
sail salt same sand save say scale school science score sea search season seat second section seed seem self sell send
sense sentence separate serve set seven several shall shape share sharp sheet ship shoe shop shore short should
shoulder shout show side sign silent silver similar simple since sing single sister sit size skill skin sky sleep slow
small smell smile snow soft soil soldier solution some son song soon sound south space speak special speech speed
spell spend spoke spot spread spring square stand star start state station stay steel step stick still stone stop
store storm story straight strange stream street stretch string strong student study subject success sudden suffer
sugar suit summer sun supply support sure surface surprise sweet swim system table tail take talk tall teach team
teeth tell ten term test thank thick thin thing think third though thought thousand three through throw thus time tiny
tire together tone tool top total touch toward town track trade train travel tree triangle trip trouble truck true
trust try tube turn twenty type uncle under unit until usual valley value vary verb very view village visit voice
vowel wait walk wall want war warm wash watch water wave way wear weather week weight well west wheel white whole wide
wife wild will wind window wing winter wire wish woman wonder wood word work world worth write wrong yard year yellow
young
"""
WORDS = tuple(_COMMON_WORDS.split())

FITTING_ROUNDS = 16

CountTokens = Callable[[str], int]
"""Returns the number of tokens of a text alone."""
AskServer = Callable[[str], Awaitable[int | None]]
"""Returns the number of tokens of a prompt, by the server's count; None if it does not tell."""


@dataclass(frozen=True)
class Words:
    """Makes texts of a wanted number of tokens.

    `overhead`: tokens that the server adds to a text, such as a chat template's. `count`: None without a tokenizer.
    """

    per_word: float = 1.0
    overhead: int = 0
    characters_per_token: float = 4.0
    count: CountTokens | None = None
    is_estimate: bool = False  # the server does not count, so a word was taken as a token

    def text(self, draw: random.Random, tokens: int, *, overhead: int | None = None) -> str:
        """A text of random words that has `tokens` tokens with the overhead, or a single word if it alone has more."""
        wanted = tokens - (self.overhead if overhead is None else overhead)
        words = draw.choices(WORDS, k=max(1, round(wanted / self.per_word)))
        return " ".join(words) if self.count is None else self._fitted(words, wanted, draw, self.count)

    def _fitted(self, words: list[str], wanted: int, draw: random.Random, count: CountTokens) -> str:
        """Add and remove words until the text has `wanted` tokens, or is as near as one of FITTING_ROUNDS was."""
        nearest, nearest_text = math.inf, ""
        for _ in range(FITTING_ROUNDS):
            text = " ".join(words)
            missing = wanted - count(text)
            if abs(missing) < nearest:
                nearest, nearest_text = abs(missing), text
            if missing == 0:
                break
            change = max(1, int(abs(missing) / self.per_word))
            if missing > 0:
                words += draw.choices(WORDS, k=change)
            else:
                del words[max(1, len(words) - change) :]
        return nearest_text

    def tokens(self, text: str) -> int:
        """Number of tokens of a text alone; an estimate by its length if there is no tokenizer."""
        return round(len(text) / self.characters_per_token) if self.count is None else self.count(text)


async def calibrate(ask: AskServer, fewest_words: int, seed: str, count: CountTokens | None = None) -> Words:
    """Learn how many tokens words have, from the server's count of two prompts: one has all words, one a single word.

    If the server refuses the long one, `fewest_words` words are asked instead. Raises RequestFailure.
    """
    draw = random.Random(f"{seed}:calibration")
    words = draw.sample(WORDS, k=len(WORDS))
    of_word = await ask(words[0])
    try:
        of_all = await ask(" ".join(words))
    except RequestFailure as failure:
        if failure.kind != "HTTP 400":
            raise
        del words[max(2, fewest_words) :]
        of_all = await ask(" ".join(words))
    text = " ".join(words)
    exact = None if count is None else count(text)
    if of_all is None or of_word is None or of_all <= of_word:
        return Words(1.0 if exact is None else exact / len(words), count=count, is_estimate=count is None)
    if exact is not None:
        return Words(exact / len(words), max(0, of_all - exact), len(text) / exact, count)
    per_word = (of_all - of_word) / (len(words) - 1)
    overhead = max(0, round(of_all - per_word * len(words)))
    return Words(per_word, overhead, len(text) / (of_all - overhead))

from collections import Counter

import pytest

from potluck.bench.mails import HAM, SPAM, Mail, divided_mails, readable
from potluck.errors import BadInput

PLAIN = "From a@b.c  Thu Aug 22 2002\nSubject: A  tip\nContent-Type: text/plain\n\nDear   all,\n\nbuy <now>.\n"
MARKED = "Subject: Hi\nContent-Type: text/html\n\n<html><style>p {}</style><body><p>Buy<br>now</p></body></html>\n"
BROKEN = "Subject: Hi\nContent-Type: text/plain; charset=no-such-one\n\nBuy now\n"


@pytest.mark.parametrize(
    ("raw", "text"), [(PLAIN, "A tip Dear all, buy <now>."), (MARKED, "Hi Buy now"), (BROKEN, "Buy now")]
)
def test_a_mail_is_its_subject_and_what_its_body_says(raw: str, text: str) -> None:
    assert readable(raw) == text


def test_a_mail_is_told_to_classifiers_and_to_models_that_answer() -> None:
    mail = Mail("Buy now", SPAM)
    assert mail.labelled() == {"text": "Buy now", "label": "spam"}
    assert mail.asked()["prompt"].startswith(mail.text)
    assert mail.asked()["prompt"].endswith("Answer:")
    assert mail.asked()["completion"] == " spam"


@pytest.mark.slow
def test_held_out_mails_are_no_others() -> None:
    try:
        train, held_out = divided_mails(1000)
    except BadInput as reason:
        pytest.skip(str(reason))
    assert len(held_out) == 1000
    assert len(train) > 4000
    assert not {mail.text for mail in train} & {mail.text for mail in held_out}
    assert all(0 < len(mail.text) <= 400 for mail in train)
    assert all(
        min(Counter(mail.label for mail in part)[kind] for kind in (HAM, SPAM)) > 200 for part in (train, held_out)
    )
    assert divided_mails(1000) == (train, held_out)

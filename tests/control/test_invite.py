import base64

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from potluck.control.invite import Invite
from potluck.errors import BadInput

INVITES = st.builds(
    Invite,
    host=st.ip_addresses().map(str),
    port=st.integers(1, 65535),
    fingerprint=st.binary(min_size=32, max_size=32),
    secret=st.binary(min_size=16, max_size=16).map(lambda secret: base64.urlsafe_b64encode(secret).decode()),
)


@given(INVITES)
def test_an_invite_is_one_word_that_reads_back(invite: Invite) -> None:
    word = invite.encode()
    assert word.isascii()
    assert not any(letter.isspace() for letter in word)
    assert Invite.decode(f"  {word[:40]}\n{word[40:]} ") == invite


@given(INVITES, st.data())
def test_a_mistyped_invite_is_told_as_such(invite: Invite, data: st.DataObject) -> None:
    word = invite.encode()
    at = data.draw(st.integers(len("potluck1."), len(word) - 1))
    letter = data.draw(st.sampled_from("ABCabc019-_é%."))
    mistyped = word[:at] + letter + word[at + 1 :]
    # the last letter of base64 may carry bits that mean nothing
    assume(mistyped != word and at < len(word) - 1)
    with pytest.raises(BadInput, match="mistyped or cut short"):
        Invite.decode(mistyped)
    with pytest.raises(BadInput, match="mistyped or cut short"):
        Invite.decode(word[:at])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is not an invite"),
        ("https://example.org", "is not an invite"),
        ("potluck2.abcd", "another version of potluck"),
        ("potluck1.", "mistyped or cut short"),
    ],
)
def test_something_else_is_no_invite(text: str, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        Invite.decode(text)


def test_a_printed_invite_hides_the_secret() -> None:
    assert "hush" not in repr(Invite("::1", 5, bytes(32), "hush"))

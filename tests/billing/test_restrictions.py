"""What a key may be used for: ranges of addresses, tags, and what could never be meant."""

import pytest

from billing.restrictions import MAX_TAGS, RestrictionError, Restrictions, check, networks


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("10.1.2.3", True),
        ("11.0.0.1", False),
        ("192.0.2.7", True),
        ("192.0.2.8", False),
        ("2001:db8::1", True),
        ("2001:db9::1", False),
        ("::ffff:10.1.2.3", True),
        ("::ffff:11.0.0.1", False),
        ("fe80::1%eth0", True),
        ("", False),
        ("unix", False),
        ("10.1.2.3, 11.0.0.1", False),
        ("10.1.2", False),
    ],
)
def test_ranges_of_addresses(address: str, allowed: bool) -> None:
    ranges = networks(["10.0.0.0/8", "192.0.2.7", " 2001:db8::/32", "fe80::/10"])
    assert Restrictions(networks=ranges).allow_address(address) is allowed
    assert Restrictions().allow_address(address)


@pytest.mark.parametrize("text", ["10.0.0.1/8", "10.0.0.0/33", "localhost", "", "2001:db8::/129", "10.*"])
def test_what_is_no_range(text: str) -> None:
    with pytest.raises(RestrictionError, match=r"write a range like 10\.0\.0\.0/8"):
        networks([text])


@pytest.mark.parametrize(
    ("restrictions", "sentence"),
    [
        (Restrictions(models=frozenset()), "without any of its models could do nothing"),
        (Restrictions(networks=()), "without any of its networks could do nothing"),
        (Restrictions(models=frozenset({" "})), "at least one visible character"),
        (Restrictions(routes=frozenset({"chat"})), "there is no route 'chat'; there are chat.completions, "),
        (Restrictions(tags={"a b": "c"}), "'a b' is not a tag's name"),
        (Restrictions(tags={"": "c"}), "'' is not a tag's name"),
        (Restrictions(tags={"x" * 65: "c"}), "is not a tag's name"),
        (Restrictions(tags={"team": "c"}), "'team' cannot be a tag"),
        (Restrictions(tags={"a": ""}), "the tag 'a' needs 1 to 256"),
        (Restrictions(tags={"a": "x" * 257}), "the tag 'a' needs 1 to 256"),
        (Restrictions(tags={"a": "b\nc"}), "the tag 'a' needs 1 to 256 printable"),
        (Restrictions(tags={f"t{number}": "x" for number in range(MAX_TAGS + 1)}), "17 tags are too many"),
    ],
)
def test_what_could_never_be_meant(restrictions: Restrictions, sentence: str) -> None:
    with pytest.raises(RestrictionError, match=sentence):
        check(restrictions)


def test_what_is_meant() -> None:
    everything = Restrictions(
        models=frozenset({"auto", "vendor/model:1"}),
        routes=frozenset({"messages", "batches"}),
        networks=networks(["::/0", "0.0.0.0/0"]),
        tags={"scenario": "客服", "feature.name": "a=b, c"},
        may_attribute=True,
    )
    check(everything)
    check(Restrictions())

import io
import xml.etree.ElementTree as ElementTree

import pytest
from PIL import Image
from rich.console import Console

from potluck.bench.picture import draw
from potluck.bench.table import largest, name_of, scheme_table
from potluck.errors import BadInput


def scheme(name, kinds, *, loss=2.1, accuracy=None, active=None, **settings):
    total = sum(kinds.values())
    return {
        "scheme": name, "client": None, "targets": None, "negatives": None, "encoding": None,
        "eval_loss": loss, "eval_accuracy": accuracy, "bytes_up": total // 2, "bytes_down": total - total // 2,
        "bytes_by_kind": kinds, "client_active_s": active, "client_peak_rss_mib": 512.0 if active else None,
        "server_s": 310.0, **settings,
    }  # fmt: skip


def a_result(accuracy=0.8, links=(20, 50)):
    one_shot = {"client": "frozen", "targets": "embeddings", "negatives": 4096, "encoding": "int8"}
    u_shaped, judged = {"client": "trainable", "encoding": "bf16"}, {"accuracy": accuracy}
    times = {str(link): [2.0, 3.0] for link in links}
    return {
        "task": "intents",
        "link_mbit": list(links),
        "schemes": [
            scheme("one-shot", {"activations": 52_000_000, "table": 5_000_000}, active=times, **one_shot, **judged),
            scheme("central", {}, **judged),
            scheme("u-shaped", {"activations": 10**9, "gradients": 10**9}, active=1410.0, **u_shaped, **judged),
            scheme("fedavg", {"adapters": 176_000_000}, active=[900.0, 910.5], encoding="fp32", **judged),
        ],
    }


def printed(table):
    console = Console(width=80, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def words_of(svg):
    """matplotlib writes each text as a comment before its glyphs."""
    builder = ElementTree.TreeBuilder(insert_comments=True)
    tree = ElementTree.fromstring(svg.read_text(), parser=ElementTree.XMLParser(target=builder))
    return [node.text.strip() for node in tree.iter() if node.tag is ElementTree.Comment]


@pytest.mark.parametrize("accuracy", [0.8, None])
def test_a_picture_says_every_scheme_kind_and_link(tmp_path, accuracy):
    draw(a_result(accuracy), tmp_path / "new" / "split.svg")
    words = words_of(tmp_path / "new" / "split.svg")
    for said in ("activations", "table", "gradients", "adapters", "20 Mbit/s", "50 Mbit/s", "4  fedavg, fp32"):
        assert said in words
    assert "1  one-shot, frozen, int8, embeddings + 4096" in words
    assert words.count("2  central") == 2, "a line, and a row"
    assert ("held-out accuracy" if accuracy else "held-out loss") in words
    assert {"57", "2,000", "176"} <= set(words), "total MB of each scheme"
    assert {"1,410", "910"} & set(words)


def test_a_png_is_drawn(tmp_path):
    draw(a_result(), tmp_path / "split.png")
    with Image.open(tmp_path / "split.png") as image:
        assert image.width > 1500
        assert len(image.convert("RGB").getcolors(1 << 24)) > 20


def test_schemes_on_one_spot_keep_apart(tmp_path):
    result = a_result()
    result["schemes"] = [result["schemes"][0]] * 6
    draw(result, tmp_path / "same.svg")
    assert set("123456") <= set(words_of(tmp_path / "same.svg"))


def test_a_result_of_central_alone_can_be_drawn(tmp_path):
    draw({"task": "text", "link_mbit": 20, "schemes": [scheme("central", {})]}, tmp_path / "central.png")
    assert (tmp_path / "central.png").stat().st_size > 10_000


def test_what_cannot_be_drawn(tmp_path):
    with pytest.raises(BadInput, match=r"\.png or \.svg"):
        draw(a_result(), tmp_path / "split.pdf")
    with pytest.raises(BadInput, match="no scheme"):
        draw({"task": "text", "link_mbit": 20, "schemes": []}, tmp_path / "split.png")


def test_the_table_fits_into_80_columns():
    result = a_result()
    result["schemes"][2] |= {"bytes_up": 98_765_432_100, "client_active_s": 23_456.0, "server_s": 98_765.4}
    said = printed(scheme_table(result))
    assert max(map(len, said.splitlines())) <= 80
    assert "…" not in said
    for word in ("one-shot", "embeddings + 4096", "98,765", "28.5", "0.800", "2.1000", "23,456"):
        assert word in said


def test_what_a_scheme_lacks_is_a_dash():
    said = printed(scheme_table({"task": "text", "link_mbit": None, "schemes": [scheme("central", {})]}))
    assert said.split("central")[1].split()[:6] == ["2.1000", "-", "0", "0", "-", "-"]


def test_names_tell_schemes_apart():
    names = [name_of(row) for row in a_result()["schemes"]]
    assert names == [
        "one-shot, frozen, int8, embeddings + 4096",
        "central",
        "u-shaped, trainable, bf16",
        "fedavg, fp32",
    ]


def test_the_slowest_client_counts():
    assert largest({"20": [1.0, 4.0], "50": [2.0]}) == 4.0
    assert largest([1, None, 3]) == 3.0
    assert largest(None) is None
    assert largest([]) is None

"""Files of a run folder beside metrics.jsonl."""

import json

from torchtitan_clone.observe.records import append_record, replace_record


def test_what_cannot_be_recorded_is_lost_with_a_warning(tmp_path, caplog):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "file.partial").symlink_to(tmp_path / "target")
    append_record(tmp_path / "link", {"step": 1})
    replace_record(tmp_path / "missing" / "file", {"step": 1})
    assert len([record for record in caplog.records if "metrics cannot be written" in record.message]) == 2
    for step in (1, 2):
        replace_record(tmp_path / "file", {"step": step})
        append_record(tmp_path / "lines", {"step": step})
    assert json.loads((tmp_path / "file").read_text()) == {"step": 2}
    assert (tmp_path / "lines").read_text() == '{"step": 1}\n{"step": 2}\n'
    assert not (tmp_path / "target").exists()

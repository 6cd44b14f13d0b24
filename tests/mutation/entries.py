"""Ways to break the files of compiled kernels: what an entry is bound to, and who may have written it."""

from targets import (
    CACHE,
    CACHED,
    TRUSTED,
    Mutant,
)

ENTRIES = [
    Mutant(
        "the key left out of an entry", CACHE, 'f"jln {key} {hashlib', 'f"jln {hashlib',
        (f"{CACHED}test_entry_of_another_key_is_as_none_and_written_again",),
    ),
    Mutant(
        "an entry's hash of its key alone", CACHE, "hashlib.sha256(packed)", "hashlib.sha256(key.encode())",
        (f"{CACHED}test_entry_with_its_code_cut_short_is_as_none",),
    ),
    Mutant(
        "an entry's first line not compared", CACHE, "if head != _head(key, packed):", "if not head:",
        (f"{CACHED}test_entry_of_another_key_is_as_none_and_written_again",),
    ),
    Mutant(
        "a link taken for an entry", CACHE, "os.O_NONBLOCK | os.O_NOFOLLOW", "os.O_NONBLOCK",
        (f"{CACHED}test_a_link_is_no_entry_and_replaced",),
    ),
    Mutant(
        "a folder not judged", CACHE, "_judge(os.fstat(descriptor), where,", "_judge(os.stat('/'), where,",
        (f"{TRUSTED}test_folder_of_another_user_is_not_used",),
    ),
    Mutant(
        "an entry not judged", CACHE, "        _judge(status, path, _REPLACED, _REPLACED)\n", "",
        (f"{TRUSTED}test_entry_of_another_user_is_not_taken_but_replaced",),
    ),
    Mutant(
        "what the group may write trusted", CACHE, "stat.S_IWGRP | stat.S_IWOTH", "stat.S_IWOTH",
        (f"{TRUSTED}test_folder_that_others_may_write_is_not_used",),
    ),
    Mutant(
        "root not trusted", CACHE, "not in (0, os.geteuid())", "!= os.geteuid()",
        (f"{TRUSTED}test_roots_folder_and_entries_are_taken",),
    ),
    Mutant(
        "the warning said each time", CACHE, "            _said.add(folder())\n", "",
        (f"{TRUSTED}test_folder_of_another_user_is_not_used",),
    ),
]  # fmt: skip

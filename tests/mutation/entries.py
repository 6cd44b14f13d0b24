"""Ways to break the files of compiled kernels: what an entry is bound to, and who may have written it."""

from targets import (
    CACHE,
    CACHED,
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
        "another user's entry taken", CACHE, "status.st_uid not in (0, os.geteuid()) or ", "",
        (f"{CACHED}test_entry_of_another_user_is_not_taken_but_replaced",),
    ),
    Mutant(
        "what the group may write trusted", CACHE, "stat.S_IWGRP | stat.S_IWOTH", "stat.S_IWOTH",
        (f"{CACHED}test_entry_that_others_may_write_is_not_taken_but_replaced",),
    ),
    Mutant(
        "root not trusted", CACHE, "not in (0, os.geteuid())", "!= os.geteuid()",
        (f"{CACHED}test_entry_of_root_is_taken",),
    ),
]  # fmt: skip

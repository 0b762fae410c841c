#!/usr/bin/env bash
# Adds ftckpt's lines to a checkout of Megatron-LM, or takes them out again.
#
#   patches/apply.sh DIR             add them; a second call changes nothing
#   patches/apply.sh DIR --reverse   take them out
#   patches/apply.sh --list          the releases that have a patch
#
# Works on copies of the files it names and puts them into place when all is checked: the tree's version, that every
# hunk fits without guessing, that nothing but the expected lines is new, and that the files compile. Needs patch or
# git, diff and Python (PYTHON, default python3); DIR need not be a git repository.

set -euo pipefail

HERE=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
PYTHON=${PYTHON:-python3}
COMPILE='import sys
for name in sys.argv[1:]:
    compile(open(name, encoding="utf-8").read(), name, "exec")'

say() {
    printf 'apply.sh: %s\n' "$*"
}

fail() {
    printf 'apply.sh: %s\n' "$*" >&2
    exit 1
}

# versions PATCH: prints what megatron/core/package_info.py of its release may say.
versions() {
    sed -n 's/^Versions: //p' "$1"
}

list() {
    local patch
    for patch in "$HERE"/core_v*.patch; do
        printf '%s (megatron-core %s)\n' "$(basename "$patch" .patch)" "$(versions "$patch" | sed 's/ / or /g')"
    done
}

# version DIR: prints the number of megatron-core in a checkout.
version() {
    sed -nE 's/^(MAJOR|MINOR|PATCH|PRE_RELEASE) = ["'\'']?([0-9a-z]*)["'\'']?$/\1 \2/p' \
        "$1/megatron/core/package_info.py" |
        awk '{ part[$1] = $2 } END { print part["MAJOR"] "." part["MINOR"] "." part["PATCH"] part["PRE_RELEASE"] }'
}

# find_patch VERSION: prints the patch for it.
find_patch() {
    local patch known
    for patch in "$HERE"/core_v*.patch; do
        for known in $(versions "$patch"); do
            [ "$known" = "$1" ] || continue
            printf '%s\n' "$patch"
            return
        done
    done
    return 1
}

files_of() {
    sed -n 's,^+++ b/,,p' "$1"
}

# added_by PATCH: prints the lines that it adds, in order.
added_by() {
    sed -n '/^+++ /d; s/^+//p' "$1"
}

copy_files() { # FROM TO
    local file
    for file in $FILES; do
        mkdir -p "$2/$(dirname "$file")"
        cat "$1/$file" >"$2/$file"
    done
}

# try TREE [-R]: applies the patch to copies, or takes it back, where every line of context fits.
try() {
    if command -v patch >/dev/null; then
        patch --directory "$1" --strip 1 --fuzz 0 --force --no-backup-if-mismatch --silent --reject-file - \
            --input "$PATCH" "${@:2}"
    else
        (cd "$1" && git apply -p1 "${@:2}" "$PATCH")
    fi
}

# check WITHOUT WITH: the two trees differ in the patch's lines and in nothing else, and all files compile.
check() {
    local file
    for file in $FILES; do
        diff "$1/$file" "$2/$file" || true
    done >"$WORK/differences"
    if grep -q '^<' "$WORK/differences"; then
        fail "the patch would change lines that it should only add to: nothing was touched"
    fi
    sed -n 's/^> //p' "$WORK/differences" | diff -q - <(added_by "$PATCH") >/dev/null ||
        fail "other lines than the patch's would be new: nothing was touched"
    # shellcheck disable=SC2086 # names without spaces, from our own patch
    (cd "$2" && "$PYTHON" -ISc "$COMPILE" $FILES) || fail "a file would not compile: nothing was touched"
}

# install_files NEW OLD: puts files into the checkout, all or none.
install_files() {
    local file
    for file in $FILES; do
        [ -w "$DIR/$file" ] || fail "$DIR/$file cannot be written: nothing was touched"
    done
    if ! copy_files "$1" "$DIR"; then
        copy_files "$2" "$DIR" || fail "writing to $DIR failed, and so did undoing it: restore these files: $FILES"
        fail "writing to $DIR failed; what was written is undone"
    fi
    for file in $FILES; do
        cmp -s "$1/$file" "$DIR/$file" || fail "$DIR/$file is not what was written to it"
    done
}

usage() {
    sed -n '4,6s/^# *//p' "${BASH_SOURCE[0]}"
}

REVERSE=
DIR=
for argument in "$@"; do
    case $argument in
    --list) list && exit ;;
    --reverse) REVERSE=yes ;;
    -h | --help) usage && exit ;;
    -*) usage >&2 && fail "unknown option $argument" ;;
    *) [ -z "$DIR" ] || fail "one directory at a time: $DIR or $argument?" && DIR=$argument ;;
    esac
done
[ -n "$DIR" ] || { usage >&2 && exit 2; }

[ -f "$DIR/megatron/core/package_info.py" ] ||
    fail "$DIR is no checkout of Megatron-LM: it has no megatron/core/package_info.py"
[ -f "$DIR/megatron/training/training.py" ] ||
    fail "$DIR is no checkout of Megatron-LM: it has no megatron/training (a wheel holds megatron.core alone)"
VERSION=$(version "$DIR")
PATCH=$(find_patch "$VERSION") ||
    fail "there is no patch for megatron-core $VERSION; there are patches for $(list | paste -sd ',' | sed 's/,/, /g')"
NAME=$(basename "$PATCH" .patch)
FILES=$(files_of "$PATCH")
for tool in diff "$PYTHON"; do
    command -v "$tool" >/dev/null || fail "$tool was not found, and is needed to check what the patch does"
done
command -v patch >/dev/null || command -v git >/dev/null ||
    fail "neither patch nor git was found: install one of them (Debian: apt-get install patch)"
for file in $FILES; do
    [ -f "$DIR/$file" ] || fail "$DIR says that it is megatron-core $VERSION and has no $file: not a whole checkout"
done

WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
mkdir "$WORK/before" "$WORK/after"
copy_files "$DIR" "$WORK/before"
copy_files "$DIR" "$WORK/after"

# shellcheck disable=SC2086 # names without spaces, from our own patch
if (cd "$DIR" && grep -qw ftckpt $FILES); then
    try "$WORK/after" -R >"$WORK/log" 2>&1 || {
        cat "$WORK/log" >&2
        fail "$DIR has lines of ftckpt, but not those of $NAME as they are here: nothing was touched. Take them out" \
            "with the apply.sh that put them in, or restore these files: $FILES"
    }
    check "$WORK/after" "$WORK/before"
    [ -n "$REVERSE" ] || { say "$NAME is already applied to $DIR" && exit; }
    # shellcheck disable=SC2086
    if (cd "$WORK/after" && grep -w ftckpt $FILES); then fail "these lines would be left: nothing was touched"; fi
    install_files "$WORK/after" "$WORK/before"
    say "$NAME is taken out of $DIR: $(added_by "$PATCH" | wc -l) lines in $(wc -w <<<"$FILES") files"
else
    [ -z "$REVERSE" ] || { say "$NAME is not applied to $DIR: nothing to take out" && exit; }
    try "$WORK/after" >"$WORK/log" 2>&1 || {
        cat "$WORK/log" >&2
        fail "$DIR says that it is megatron-core $VERSION, but $NAME does not fit: nothing was touched. Is it a changed" \
            "checkout? The run-time hooks may work: torchrun ... -m ftckpt.megatron SCRIPT ARGS... --ftckpt"
    }
    check "$WORK/before" "$WORK/after"
    install_files "$WORK/after" "$WORK/before"
    say "$NAME is applied to $DIR: $(added_by "$PATCH" | wc -l) lines in $(wc -w <<<"$FILES") files"
fi

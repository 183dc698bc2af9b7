#!/usr/bin/env bash
# Makes a release of the version in src/lamina/__init__.py: checks, wheel and sdist in dist/, an
# installation of the wheel in a fresh environment, and the tag. Nothing is uploaded or pushed.
#   scripts/release.sh              needs a clean tree, a dated entry in CHANGELOG.md with nothing left
#                                   under Unreleased, and no such tag
#   scripts/release.sh --dry-run    everything but the tag; the entry may be without a date yet
# CHECK: the command that must succeed before anything is built (default .ci/run).
# PYTHON: which Python builds and installs (default python3).
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONPATH # what is tried is what the wheel has

refuse() {
  echo "release: $*" >&2
  exit 1
}

dry_run=false
case "$*" in
  '') ;;
  --dry-run) dry_run=true ;;
  *) refuse "there is no option '$*'; there is --dry-run" ;;
esac

check_clean() {
  local changes
  changes=$(git status --porcelain)
  [ -z "$changes" ] || refuse "$1: commit or remove"$'\n'"$changes"
}

# What has no version yet: the lines below its heading, which stays where it is.
unreleased() {
  awk '/^## /{ inside = /^## \[Unreleased\]/; next } inside && NF' CHANGELOG.md
}

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' src/lamina/__init__.py)
tag=v$version
check_clean "the tree is not clean"
grep -q "^## \[$version\]" CHANGELOG.md || refuse "CHANGELOG.md says nothing of $version"
[ -z "$(unreleased)" ] || refuse "CHANGELOG.md has lines under Unreleased: move them to [$version]"
if ! grep -qE "^## \[$version\] - [0-9]{4}-[0-9]{2}-[0-9]{2}$" CHANGELOG.md; then
  $dry_run || refuse "CHANGELOG.md gives $version no date: '## [$version] - YYYY-MM-DD'"
  echo "release: CHANGELOG.md gives $version no date yet"
fi
! git rev-parse --quiet --verify "refs/tags/$tag" > /dev/null || refuse "the tag $tag exists"
read -ra check <<< "${CHECK:-.ci/run}"
"${check[@]}" || refuse "${check[*]} has failed"
check_clean "${check[*]} has changed the tree"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=$(python3 -m scripts.pythons "${PYTHON:-python3}")
"$python" -m venv "$work/build"
pip() { "$work/build/bin/pip" --disable-pip-version-check "$@"; }

rm -rf dist
pip install --quiet build hatchling
"$work/build/bin/python" -m build --no-isolation --outdir dist . > "$work/build.log" 2>&1 || {
  cat "$work/build.log"
  refuse "it cannot be built"
}
wheel=$PWD/dist/lamina-$version-py3-none-any.whl
[ -f "$wheel" ] && [ -f "dist/lamina-$version.tar.gz" ] || refuse "dist/ has $(ls dist)"
held=$("$python" -m zipfile -l "$wheel")
for file in lamina/py.typed lamina_lab/py.typed "lamina-$version.dist-info/licenses/LICENSE"; do
  grep -qF "$file " <<< "$held" || refuse "the wheel has no $file"
done

cd "$work" # where nothing of the source can be imported by accident
"$python" -m venv --without-pip fresh
pip --python fresh/bin/python install --quiet "$wheel"
needs=$(pip --python fresh/bin/python list --format freeze | sed 's/[ =].*//' | sort | xargs)
[ "$needs" = "lamina msgspec numpy" ] || refuse "an engine would get $needs"
fresh/bin/python -c "import lamina.client, lamina.devices.host, lamina.devices.cuda" ||
  refuse "an engine's side cannot be imported from the wheel"
pip --python fresh/bin/python install --quiet "$wheel[server]"
[ "$(fresh/bin/lamina --version)" = "$version" ] || refuse "lamina --version is not $version"
fresh/bin/lamina serve --help > help.txt || refuse "lamina serve does not begin"
cd - > /dev/null

if $dry_run; then
  echo "release: $version is ready in dist/; without --dry-run it would be tagged $tag"
else
  git tag --annotate "$tag" --message "Lamina $version"
  echo "release: $version is in dist/ and tagged. To publish it: git push origin $tag"
fi

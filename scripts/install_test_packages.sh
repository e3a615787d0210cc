#!/bin/sh
# Install the Debian packages that tests need: Chromium, for the tests of the web page. Does nothing if it is
# there. Never fails: without a browser these tests are skipped, and say so.
set -u

for browser in chromium chromium-browser google-chrome; do
    if command -v "$browser" > /dev/null; then
        exit 0
    fi
done

hint="the tests of the web page are skipped; install Chromium (on Debian: apt-get install chromium) to run them"
if ! command -v apt-get > /dev/null; then
    echo "no browser, and no apt-get to install one with: $hint"
    exit 0
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "no browser, and only root can install one: $hint"
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
apt="timeout 150 apt-get -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o DPkg::Lock::Timeout=30"
if $apt update > "$log" 2>&1 && $apt install --yes --no-install-recommends chromium >> "$log" 2>&1; then
    echo "installed Chromium for the tests of the web page"
else
    tail -n 5 "$log"
    echo "Chromium could not be installed: $hint"
fi
rm -f "$log"

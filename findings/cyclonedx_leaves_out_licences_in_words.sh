#!/usr/bin/env bash
# cyclonedx-py lists no licence of a package whose metadata has one in words, such as protobuf's "License: 3-Clause BSD
# License" or transformers' "License: Apache 2.0 License", and says nothing about it. SPDX ids and classifiers are listed.
# The words count as a licence's text: they are listed with --gather-license-texts alone.
#
# Seen with cyclonedx-bom 7.5.0 on Python 3.11:
#   cyclonedx-bom 7.5.0
#   protobuf 6.33.6: metadata 3-Clause BSD License, listed [], with texts ['3-Clause BSD License']
#   transformers 5.24.0: metadata Apache 2.0 License, listed [], with texts ['Apache 2.0 License']
#   tabulate 0.9.0: metadata MIT, listed ['MIT'], with texts ['MIT']
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for name in tool target; do python3 -m venv "$folder/$name"; done
"$folder/tool/bin/pip" install --quiet cyclonedx-bom==7.5.0
"$folder/target/bin/pip" install --quiet --no-deps protobuf==6.33.6 transformers==5.24.0 tabulate==0.9.0
"$folder/tool/bin/cyclonedx-py" environment "$folder/target/bin/python" >"$folder/plain.json"
"$folder/tool/bin/cyclonedx-py" environment --gather-license-texts "$folder/target/bin/python" >"$folder/texts.json"
cat >"$folder/licences.py" <<'PYTHON'
import json
import sys
from importlib.metadata import distributions

NAMES = ("protobuf", "transformers", "tabulate")


def listed(path):
    """Return the ids of each component's licences, or their text where they have no id."""
    found = {}
    with open(path) as file:
        for component in json.load(file)["components"]:
            licences = [each["license"] for each in component.get("licenses", [])]
            ids = [licence["id"] for licence in licences if "id" in licence]
            texts = [licence["text"]["content"] for licence in licences if "text" in licence]
            found[component["name"]] = ids or texts
    return found


folder = sys.argv[1]
metadata = {
    each.metadata["Name"]: each.metadata
    for each in distributions(path=[sys.argv[2]])
}
plain, texts = listed(f"{folder}/plain.json"), listed(f"{folder}/texts.json")
for name in NAMES:
    told = metadata[name]
    print(f"{name} {told['Version']}: metadata {told['License']}, listed {plain[name]}, with texts {texts[name]}")
holds = all(plain[name] == [] and texts[name] == [metadata[name]["License"]] for name in NAMES[:2])
sys.exit(not (holds and plain["tabulate"] == ["MIT"]))
PYTHON
echo "cyclonedx-bom 7.5.0"
python3 "$folder/licences.py" "$folder" "$folder"/target/lib/python*/site-packages

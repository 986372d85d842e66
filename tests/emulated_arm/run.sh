#!/usr/bin/env bash
# Four-bit weights on ARM, under emulation: tests/emulated_arm/run.sh FOLDER [MODEL], by hand, not in the gate.
# FOLDER (1 GB) keeps Debian's Python and torch for ARM for a next run. Needs Linux on x86, Debian's packages
# qemu-user-static, debootstrap and g++-aarch64-linux-gnu, PyPI, and a `python` 3.11 in which sirchat's packages
# and those of its tests are installed, and no others.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mkdir -p "$1" && cd "$1" && pwd)
model=${2:-smollm2}
root=$folder/root site=$folder/site

if [ ! -e "$root/usr/bin/python3.11" ]; then  # unpacked only: no second stage, no chroot, no binfmt
  debootstrap --arch=arm64 --foreign --variant=minbase --include=python3 bookworm "$root"
  for package in "$root"/var/cache/apt/archives/*.deb; do dpkg -x "$package" "$root"; done
fi
if [ ! -e "$site/torch" ]; then
  # 2.10.0: later wheels for ARM are builds with CUDA. The rest as installed here; pure Python is used from here.
  wanted=$(python -c 'from importlib.metadata import version
for name in "numpy tokenizers safetensors regex pyyaml pydantic-core markupsafe hypothesis psutil scipy".split():
    print(f"{name}=={version(name)}")')
  platforms=()
  for one in manylinux_2_28 manylinux_2_27 manylinux2014 manylinux_2_17; do platforms+=(--platform "${one}_aarch64"); done
  # shellcheck disable=SC2086
  python -m pip install -q --no-deps --only-binary=:all: --python-version 3.11 --implementation cp \
    "${platforms[@]}" --target "$site" torch==2.10.0 $wanted
fi

pure=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
export PYTHONPATH=$here/../.. SIRCHAT_HOME=$folder/home PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
# The compiler runs here, not under emulation, and does not know which processor is emulated.
cat > "$folder/cross-compiler" << 'END'
#!/usr/bin/env bash
exec aarch64-linux-gnu-g++ "${@/-mcpu=native/-march=${KIND:-armv8.2-a+dotprod}}"
END
chmod +x "$folder/cross-compiler"
on_arm() {
  QEMU_LD_PREFIX=$root PYTHONPATH=$site:$PYTHONPATH:$pure \
    nice -n 10 qemu-aarch64-static -cpu max "$root/usr/bin/python3.11" "$@"
}
logits() { "${@:2}" "$here/logits.py" "$model" "$folder/$1-${again:-$how}.npz" "$how"; }
for how in auto own float32; do logits here python; done
rm -rf "$SIRCHAT_HOME"
for how in auto own; do CXX=$folder/cross-compiler logits arm on_arm; done
how=auto again=again logits arm on_arm
python "$here/compare.py" "$folder"
for kind in armv8-a armv8.2-a+dotprod; do
  KIND=$kind CXX=$folder/cross-compiler on_arm -m pytest -q -n0 -p no:cacheprovider \
    "$here/../models/test_products.py" -k "err_only or same_bits or attention or no_number or damaged"
done

talk='My name is Anna.
What is my name?'
here_said=$(python -m sirchat --quiet --model tiny --quantize int4 <<< "$talk")
there_said=$(on_arm -m sirchat --quiet --model tiny --quantize int4 <<< "$talk")
echo "$there_said"
[ "$here_said" = "$there_said" ]

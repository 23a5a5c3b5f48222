#!/usr/bin/env bash
# run.sh CACHE-FOLDER STATIC-PROGRAM [ARGUMENT...]
#
# Runs a static program on an emulated processor with AVX-512 (Bochs, with a Debian kernel that is downloaded and not
# installed), prints what it prints, and returns its status; 125 if the machine did not get that far. It is for results,
# never for speed: a second takes about 50 million instructions.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cache=$1 program=$2
shift 2
limit=${LIMIT:-600}
mkdir -p "$cache"

kernel=$cache/vmlinuz
if [ ! -f "$kernel" ]; then
  package=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p' | head -n 1)
  download=$(mktemp -d "$cache/kernel.XXXXXX")
  (cd "$download" && apt-get -o APT::Sandbox::User=root download -qq "$package" && dpkg-deb -x "$package"_*.deb unpacked) || exit 125
  mv "$download"/unpacked/boot/vmlinuz-* "$kernel"
  rm -rf "$download"
fi

run=$(mktemp -d "$cache/run.XXXXXX")
bochs_pid=
cleanup() {
  [ -z "$bochs_pid" ] || kill "$bochs_pid" 2>/dev/null || true
  rm -rf "$run"
}
trap cleanup EXIT
trap 'exit 125' INT TERM

mkdir -p "$run/tree/dev" "$run/disc"
cc -O1 -static -o "$run/tree/init" "$here/init.c"
cp "$program" "$run/tree/program"
strip "$run/tree/program"
printf '%s\0' "$@" >"$run/tree/arguments"
mknod "$run/tree/dev/console" c 5 1
(cd "$run/tree" && find . -print0 | cpio --null --create --format=newc --quiet) >"$run/disc/initrd"
cp "$kernel" /usr/lib/ISOLINUX/isolinux.bin /usr/lib/syslinux/modules/bios/ldlinux.c32 "$run/disc/"
# Bochs' processor and this kernel disagree on the size of a compacted register file, and the kernel would then switch
# all AVX off: without xsavec and xsaves they agree.
cat >"$run/disc/isolinux.cfg" <<CONFIG
default linux
prompt 0
label linux
  kernel vmlinuz
  append initrd=initrd rdinit=/init console=ttyS0,115200n8 quiet panic=-1 nokaslr mitigations=off nosmp nowatchdog lpj=400000 tsc=reliable clocksource=tsc no_timer_check cryptomgr.notests noxsaves clearcpuid=xsavec
CONFIG
xorriso -as mkisofs -quiet -o "$run/disc.iso" -b isolinux.bin -c boot.cat -no-emul-boot -boot-load-size 4 \
  -boot-info-table "$run/disc" 2>/dev/null

cat >"$run/bochsrc" <<CONFIG
config_interface: textconfig
display_library: rfb, options="timeout=0"
cpu: model=corei7_skylake_x, count=1, ips=100000000, reset_on_triple_fault=0, ignore_bad_msrs=1
memory: guest=256, host=256
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/vgabios/vgabios.bin
vga: extension=vbe, update_freq=1
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=cdrom, path="$run/disc.iso", status=inserted
boot: cdrom
speaker: enabled=0
sound: driver=dummy
clock: sync=none, time0=local
com1: enabled=1, mode=file, dev="$run/status"
com2: enabled=1, mode=file, dev="$run/output"
log: $run/log
panic: action=fatal
error: action=ignore
info: action=ignore
CONFIG
echo c >"$run/debugger" # Debian builds Bochs with its debugger, which has to be told to go on.
touch "$run/status" "$run/output"
# In a network namespace of its own, because its display would listen on all interfaces.
timeout -k 5 "$limit" unshare --net bochs -q -f "$run/bochsrc" -rc "$run/debugger" >/dev/null 2>&1 </dev/null &
bochs_pid=$!
wait "$bochs_pid" || true
bochs_pid=
cat "$run/output"
status=$(tr -d '\r' <"$run/status" | sed -n 's/^@@EXIT \([0-9]*\)@@$/\1/p' | tail -n 1)
if [ -z "$status" ]; then
  echo "the emulated machine did not finish within $limit s:" >&2
  tail -n 20 "$run/status" >&2
  exit 125
fi
exit "$status"

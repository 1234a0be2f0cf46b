# . dev/carry.sh - makes this shell use what `python3 -m dev.gpu --pack build/carry` has packed on another machine: programs, in
# build/, Open MPI, and libraries. NVIDIA's libraries are found where pip has put them.
# CARRY=DIR: the folder that has carry.tar.xz (default build/carry)
carry=$(cd "${CARRY:-build/carry}" && pwd)
if [ ! -d "$carry/unpacked" ] || [ "$carry/carry.tar.xz" -nt "$carry/unpacked" ]; then
    rm -rf "$carry/unpacked"
    python3 -m tarfile -e "$carry/carry.tar.xz" "$carry/unpacked" # where there is no xz
    touch "$carry/unpacked"
fi
carry=$carry/unpacked
mkdir -p build
cp -r "$carry/programs/build/." build
wheels=$("${PYTHON:-python3}" -c 'import glob, nvidia
print(":".join(lib for path in nvidia.__path__ for lib in sorted(glob.glob(path + "/*/lib"))))' 2>/dev/null)
export OPAL_PREFIX="$carry/mpi" PRTE_PREFIX="$carry/mpi" PMIX_PREFIX="$carry/mpi"
export PATH="$carry/mpi/bin:$PATH" INPUTS="$PWD/build/inputs"
export LD_LIBRARY_PATH="$carry/lib:$carry/mpi/lib${wheels:+:$wheels}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
case $(ldconfig -p 2>/dev/null) in
    *libstdc++.so.6*libgomp.so.1* | *libgomp.so.1*libstdc++.so.6*) ;;
    *) LD_LIBRARY_PATH=$LD_LIBRARY_PATH:$carry/base ;;
esac
if [ -e "$carry/train_gpt2cu" ] && [ -z "${LLMC:-}" ]; then export LLMC="$carry/train_gpt2cu"; fi

#!/bin/bash
# dev/launch: what each script starts, where and with which variables; and two nodes made of network namespaces, on which the
# training program runs as on one node.
. test/lib.sh
[ "$BUILD" = build ] || { echo "1..0 # SKIP it is the same in every build"; exit 0; }
fsdp=$BUILD/train_gpt2_fsdp
says() { grep -qe "$1" "$work/said" || { echo "it did not say '$1', but"; cat "$work/said"; return 1; }; }
small=(--data $REFERENCE/tokens.bin --val-data= --model d1 --heads 2 --channels 16 --seq-len 16 --batch-size 2 --steps 3
    --warmup-steps 1 --lr 3e-3 --eval-every 0 --sample-every 0)

# A launcher that prints its arguments.
printf '#!/bin/sh\necho "$@"\n' > "$work/told"
chmod +x "$work/told"

for script in dev/launch/*.sh; do check "$script can be read by its shell" "$(sed -n '1s/^#!.*\///p' "$script")" -n "$script"; done

# ---- mpirun ----
printf '# two nodes\n\nnode1 slots=4\nnode2 slots=3 # one is broken\nnode3\n' > "$work/hosts"
by_mpirun() { env -u OMP_NUM_THREADS -u OMP_WAIT_POLICY MPIRUN="$work/told" "$@" sh dev/launch/mpirun.sh "$work/hosts" ./program --steps 3 > "$work/said"; }
check "mpirun gets a rank for each slot of the hostfile" eval 'by_mpirun env && says "^--hostfile $work/hosts --map-by slot .*-np 8 ./program --steps 3$"'
check "  and passes on the environment variables that ranks need" eval 'by_mpirun env OMP_NUM_THREADS=2 NCCL_DEBUG=INFO && says "-x NCCL_DEBUG -x OMP_NUM_THREADS ./program"'
check "  and the network interface to use" eval 'by_mpirun env INTERFACE=eth1 && says "--mca btl_tcp_if_include eth1 --mca oob_tcp_if_include eth1 -x NCCL_SOCKET_IFNAME ./program"'
check "a hostfile that is not there is an error" fails_with "there is no hostfile $work/none" -- sh dev/launch/mpirun.sh "$work/none" ./program
echo '# nothing' > "$work/empty"
check "a hostfile without a node is an error" fails_with "names no node" -- sh dev/launch/mpirun.sh "$work/empty" ./program

echo "localhost slots=2" > "$work/here"
check "two ranks on this machine, from a hostfile" eval 'OMP_NUM_THREADS=1 sh dev/launch/mpirun.sh "$work/here" "$fsdp" "${small[@]}" > "$work/said" 2>&1 && says "^ranks  *2, 2 on this machine, found by OpenMPI" && says "^step 3/3 "'

# ---- Slurm ----
mkdir "$work/bin"
cp "$work/told" "$work/bin/srun"
by_slurm() { SLURM_NTASKS_PER_NODE=2 SLURM_CPUS_PER_TASK=1 OUT=$work/slurm PROGRAM=$fsdp PATH=$work/bin:$PATH bash dev/launch/slurm.sh "$@" > "$work/said" 2>&1; }
check "Slurm's script shards within a node" eval 'by_slurm --lr 3e-4 && says "^--mpi=pmix --kill-on-bad-exit=1 $fsdp --model gpt2-xl .*--shard-group 2 .*--lr 3e-4$" && not says -e--resume > /dev/null'
mkdir -p "$work/slurm/step_00000250"
check "  and resumes if there is a checkpoint" eval 'by_slurm && says "--checkpoint sharded --resume$"'
rm -r "$work/slurm"
printf '#!/bin/bash\nshift 2\nOMP_NUM_THREADS=1 exec %s -np 2 "$@"\n' "$MPIRUN" > "$work/bin/srun"
check "  it passes its options to the program" eval 'by_slurm --tokenizer bytes "${small[@]}" --batch-size 1 --total-batch-size 64 && says "saved step 3 under" && ls "$work/slurm/step_00000003/model-00002-of-00002.safetensors"'
check "outside of a job it says how to use it" eval 'not env -u SLURM_NTASKS_PER_NODE PROGRAM=$fsdp bash dev/launch/slurm.sh 2> "$work/said" && says "sbatch dev/launch/slurm.sh"'
check "  and without the program, how to build it" fails_with "there is no ./train_gpt2_none here" "make train_gpt2_fsdp" -- env SLURM_NTASKS_PER_NODE=2 PROGRAM=./train_gpt2_none bash dev/launch/slurm.sh

# ---- by hand ----
by_hand() { sh dev/launch/by_hand.sh "$@"; }
who='echo "$RANK of $WORLD_SIZE, here $LOCAL_RANK of $LOCAL_WORLD_SIZE, meeting at $MASTER_ADDR $MASTER_PORT"'
check "two nodes by hand number their ranks" eval 'by_hand 1 2 2 node1:2950 sh -c "$who" > "$work/two" & by_hand 0 2 2 node1:2950 sh -c "$who" > "$work/one" && wait $! && sort "$work/one" "$work/two" > "$work/said" &&
    says "^0 of 4, here 0 of 2, meeting at node1 2950" && says "^1 of 4, here 1 of 2" && says "^2 of 4, here 0 of 2" && says "^3 of 4, here 1 of 2" && [ "$(wc -l < "$work/said")" = 4 ]'
check "  a rank that fails gives its status" eval 'by_hand 0 1 3 here:2950 sh -c "exit \$RANK"; [ $? -eq 2 ]'
check "  a node beyond the last is an error" fails_with "NODE must be at most 1 with 2 nodes" -- by_hand 2 2 1 here:2950 true
check "  so is an address without a port" fails_with "ADDRESS:PORT must be like" -- by_hand 0 1 1 here true
check "  on the CPU MPI needs a launcher: the error says so" eval 'not by_hand 0 1 2 127.0.0.1:$((20000 + $$ % 20000)) $fsdp "${small[@]}" --comm-timeout 20 > "$work/said" 2>&1 && says "error: .*mpirun"'
over_nccl() {
    (export TMPDIR=$work CUDA_EMULATOR_DEVICES=2; by_hand 0 1 2 127.0.0.1:$((20000 + $$ % 20000)) $1 "${small[@]}" --comm-timeout 60 > "$work/said" 2>&1) &&
        says "^ranks  *2, 2 on this machine, found by torchrun; NCCL" && says "^step 3/3 "
}
if [ -x build/emulated/train_gpt2_fsdp ]; then check "  but NCCL, or its stand-in, needs none" over_nccl build/emulated/train_gpt2_fsdp
else skip "  but NCCL needs none" "there is no build/emulated/train_gpt2_fsdp, which emulated_fsdp.t makes"; fi

# ---- two nodes here ----
nodes() { OMP_NUM_THREADS=1 sh dev/launch/nodes_here.sh 2 "$fsdp" "${small[@]}" "$@" > "$work/said" 2>&1 || { tail -n 20 "$work/said"; return 1; }; }
over_the_link() { sed -n 's/^over the link: \([0-9.]*\) MB.*/\1/p' "$work/said"; }
if ip netns add "try$$" 2> /dev/null; then
    ip netns del "try$$"
    check "two nodes of two ranks, as network namespaces" nodes --sharding hybrid --shard-group 2 --deterministic --out "$work/two_nodes"
    check "  are two nodes" says "^ranks  *4, 2 on this machine"
    hybrid=$(over_the_link)
    check "  and train as one node does" on_ranks 4 "$fsdp" "${small[@]}" --sharding hybrid --shard-group 2 --deterministic --out "$work/one_node"
    check "  to the bit" same_run "$work/one_node" "$work/two_nodes" 00000003
    # a larger model: less goes over the link if only shards of gradients do
    check "  sharded over both nodes" nodes --channels 128 --sharding full
    full=$(over_the_link)
    check "    more goes over the link than with hybrid sharding" eval 'nodes --channels 128 --sharding hybrid --shard-group 2 && hybrid=$(over_the_link) && echo "$full MB, $hybrid MB" &&
        awk -v full="$full" -v hybrid="$hybrid" "BEGIN { exit !(full > 1.5 * hybrid && hybrid > 0) }"'
    check "  a rank that dies on the other node is named" eval 'not nodes --fault 3:2:kill > /dev/null; says "rank 0: error: rank 3 has died"'
    left_behind() { # a namespace of a script that has ended
        local node pid
        for node in $(ip netns list | grep -o "^shard[0-9]*-[01]"); do
            pid=${node#shard}
            kill -0 "${pid%-?}" || return 0
        done
        return 1
    }
    check "  nothing is left of the nodes" not left_behind
    check "a word for the number of ranks is an error" fails_with "RANKS-PER-NODE must be a whole number" -- sh dev/launch/nodes_here.sh many true
else
    skip "two nodes" "network namespaces need root, and ip"
fi
done_testing

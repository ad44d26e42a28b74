"""kernels: speed -- hand-written fast paths for the hot loops of Esper.

You do not need to read this package to change the system. Every kernel has a plain twin that
defines what it computes, and a parity test that compares the two.

| kernel | plain twin | parity test |
|---|---|---|
| `gae/numba_cpu.py`, `gae/triton_cuda.py` | `gae/reference.py` | `tests/simic/test_gae.py` |
| `lstm/numba_lstm.py`, `lstm/triton_lstm.py` | `lstm_loop` in `tamiyo/policy/recurrence.py` | `tests/tamiyo/test_recurrence.py` |
| `choices/numba_choices.py` | `choose_group` in `tamiyo/policy/distributions.py` | `tests/tamiyo/test_choices.py` |
| `loss/numba_loss.py` | `plain_loss` in `simic/agent/ppo_loss.py` | `tests/simic/test_ppo_loss.py` |
| `hosts/compiled.py`, `hosts/numba_*.py` (CPU) | `tolaria/batched.py` | `tests/tolaria/test_steps.py` |
| `hosts/fused*.py`, `hosts/fused_*.cu` (CUDA) | `tolaria/batched.py` | `tests/tolaria/test_fused.py` |

`tests/tolaria/test_parity.py` compares the plain twin of the hosts' kernels with stock modules
that are trained one by one. For a step of 8 small hosts on a CPU, numba is 12 times as fast as
the twin. On an H200, the fused kernel is 4 to 16 times as fast as the twin's operations captured
as CUDA graphs (`benchmarks/results/population_h200.md`).
"""

"""What an all-reduce costs, and how many tokens a device needs so that the backward pass hides it: peak figures."""

from course.machines import machine

GRADIENT_BYTES = 4  # float32 gradients, products in the machine's 16-bit format
DEVICES = 8
GIGABIT_400 = 50e9


def tokens(flops: float, bandwidth: float, size: int, devices: int = DEVICES) -> float:
    """Tokens a device at which the reduction takes as long as the backward pass: 4 T N / C = 2 (n-1)/n b N / beta."""
    return size / 2 * (devices - 1) / devices * flops / bandwidth


def hiding() -> None:
    print(f"{'8 devices':28}{'TFLOP/s':>9}{'GB/s':>8}{'tokens, float32':>18}{'tokens, bfloat16':>18}")
    for name, label, bandwidth in (
        ("8xA5000", "A5000, pairs and PCIe", None),
        ("8xA100", "A100, NVLink", None),
        ("8xH100", "H100, NVLink", None),
        ("8xH100", "H100, 400 Gbit/s network", GIGABIT_400),
    ):
        of = machine(name)
        rate, link = of.matmul_flops["bf16"], bandwidth or of.bandwidth_of(tuple(range(DEVICES)))
        needed = (f"{tokens(rate, link, size):,.0f}" for size in (4, 2))
        print(f"{label:28}{rate / 1e12:9.1f}{link / 1e9:8.1f}" + "".join(f"{text:>18}" for text in needed))


def scaling(parameters: float = 1e9, batch: int = 131072) -> None:
    """A fixed batch on more and more devices: the step with nothing hidden, and with everything hidden that can be."""
    h100 = machine("8xH100")
    rate = h100.matmul_flops["bf16"]
    print(f"{'devices':>8}{'tokens each':>13}{'compute, ms':>13}{'reduce, ms':>12}{'in turn':>10}{'overlapped':>12}")
    alone = 6 * batch * parameters / rate
    for n in (1, 2, 4, 8, 16, 32, 64, 128):
        each = batch / n
        forward, backward = 2 * each * parameters / rate, 4 * each * parameters / rate
        reduce = 2 * (n - 1) / n * GRADIENT_BYTES * parameters / GIGABIT_400
        steps = (forward + backward + reduce, forward + max(backward, reduce))
        speed = [f"{alone / step:.1f}x" for step in steps]
        print(f"{n:8}{each:13,.0f}{1e3 * (forward + backward):13.1f}{1e3 * reduce:12.1f}{speed[0]:>10}{speed[1]:>12}")


if __name__ == "__main__":
    hiding()
    print("\nOne batch of 131,072 tokens, 1e9 parameters, H100s on a 400 Gbit/s network, float32 gradients:\n")
    scaling()

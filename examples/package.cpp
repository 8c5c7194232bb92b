// A package of `mp.compile_package` in C++, without Python: from the start of the process to the first answer.
//
//     package model.pt2 SIZE...     sizes of one input, its batch first: package model.pt2 1 3 32 32
//
// Prints every output (means and variances, in the order of `momentprop inspect model.pt2`) for an input of zeros, and
// the seconds that took. A package is machine code and runs with all your rights: load what you made yourself.
//
// To build it, with the torch that made the package:
//
//     TORCH=$(python -c 'import torch; print(torch.__path__[0])')
//     g++ -std=c++20 -O2 examples/package.cpp -o package -I$TORCH/include -L$TORCH/lib -Wl,-rpath,$TORCH/lib \
//         -ltorch_cpu -lc10

#include <ATen/Tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

using Clock = std::chrono::steady_clock;

static double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

int main(int argc, char** argv) try {
  const auto start = Clock::now();
  if (argc < 3) {
    std::fprintf(stderr, "usage: package MODEL.pt2 SIZE...\n");
    return 2;
  }
  std::vector<int64_t> sizes;
  for (int i = 2; i < argc; ++i) sizes.push_back(std::stoll(argv[i]));

  torch::inductor::AOTIModelPackageLoader package(argv[1]);
  const auto loaded = since(start);
  const auto outputs = package.run({at::zeros(sizes)});
  const auto answered = since(start);

  for (const auto& output : outputs) {
    const auto flat = output.contiguous().view(-1);
    std::printf("[");
    for (int64_t i = 0; i < flat.numel(); ++i) std::printf(i ? ", %.9g" : "%.9g", flat[i].item<double>());
    std::printf("]\n");
  }
  std::printf("loaded after %.3f s, answered after %.3f s\n", loaded, answered);
} catch (const std::exception& error) {
  std::fprintf(stderr, "package: %s\n", error.what());
  return 1;
}

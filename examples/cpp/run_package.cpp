// Runs one plain graph of a package of desugar.save from C++: tensors in, tensors out.
//
//     run_package FILE.pt2 LIBRARY INPUTS.pt
//
// PyTorch's own loader finds the library of a graph by its name: forward0 is the forward of the first program. It takes
// the plain tensors of the graph in the order of the manifest, weights included, where a declared class is its inner
// tensors. INPUTS.pt is a list of them, written by torch.save. The program prints the size and the sum of each result.
// docs/packages.md has the command that builds it.

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <vector>

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "expected: run_package FILE.pt2 LIBRARY INPUTS.pt\n";
    return 2;
  }
  std::ifstream file(argv[3], std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const c10::IValue loaded = torch::pickle_load(bytes);
  std::vector<at::Tensor> inputs;
  for (const c10::IValue& value : loaded.toListRef()) {
    inputs.push_back(value.toTensor());
  }

  torch::inductor::AOTIModelPackageLoader loader(argv[1], argv[2]);
  for (const at::Tensor& result : loader.run(inputs)) {
    std::cout << result.sizes() << " " << result.sum().item<double>() << "\n";
  }
  return 0;
}

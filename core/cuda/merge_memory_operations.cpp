#include "cuda/merge_memory_operations.hpp"

#include <algorithm>
#include <cstddef>
#include <vector>

#include <annulus/core/cuda_driver.hpp>

namespace annulus {
namespace {

constexpr std::size_t kMaximumOperations = 64;  // the driver takes up to 255 at once

using cuda::check_driver;
using cuda::driver_calls;
using Nodes = std::vector<CUgraphNode>;

Nodes nodes_of(CUgraph graph) {
  std::size_t count = 0;
  check_driver(driver_calls().graph_get_nodes(graph, nullptr, &count), "cuGraphGetNodes");
  Nodes nodes(count);
  if (count > 0) {
    check_driver(driver_calls().graph_get_nodes(graph, nodes.data(), &count), "cuGraphGetNodes");
  }
  return nodes;
}

// The nodes before or after a node.
template <class Call>
Nodes neighbours_of(CUgraphNode node, Call call, const char* name) {
  std::size_t count = 0;
  check_driver(call(node, nullptr, &count), name);
  Nodes nodes(count);
  if (count > 0) check_driver(call(node, nodes.data(), &count), name);
  return nodes;
}
Nodes before(CUgraphNode node) {
  return neighbours_of(node, driver_calls().graph_node_get_dependencies,
                       "cuGraphNodeGetDependencies");
}
Nodes after(CUgraphNode node) {
  return neighbours_of(node, driver_calls().graph_node_get_dependent_nodes,
                       "cuGraphNodeGetDependentNodes");
}

bool has_memory_operations(CUgraphNode node) {
  CUgraphNodeType type{};
  check_driver(driver_calls().graph_node_get_type(node, &type), "cuGraphNodeGetType");
  return type == CU_GRAPH_NODE_TYPE_BATCH_MEM_OP;
}

// The node's operations. The node owns the array until it changes.
CUDA_BATCH_MEM_OP_NODE_PARAMS operations_of(CUgraphNode node) {
  CUDA_BATCH_MEM_OP_NODE_PARAMS operations{};
  check_driver(driver_calls().graph_batch_mem_op_get_params(node, &operations),
               "cuGraphBatchMemOpNodeGetParams");
  return operations;
}

// Appends the operations of `next` to those of `node`, and removes `next` from the graph.
bool absorb(CUgraph graph, CUgraphNode node, CUgraphNode next) {
  CUDA_BATCH_MEM_OP_NODE_PARAMS first = operations_of(node);
  const CUDA_BATCH_MEM_OP_NODE_PARAMS second = operations_of(next);
  if (first.ctx != second.ctx || first.flags != second.flags ||
      first.count + second.count > kMaximumOperations) {
    return false;
  }
  std::vector<CUstreamBatchMemOpParams> all(first.paramArray, first.paramArray + first.count);
  all.insert(all.end(), second.paramArray, second.paramArray + second.count);
  first.count = static_cast<unsigned>(all.size());
  first.paramArray = all.data();
  check_driver(driver_calls().graph_batch_mem_op_set_params(node, &first),
               "cuGraphBatchMemOpNodeSetParams");
  for (CUgraphNode later : after(next)) {
    check_driver(driver_calls().graph_add_dependencies(graph, &node, &later, 1),
                 "cuGraphAddDependencies");
  }
  check_driver(driver_calls().graph_destroy_node(next), "cuGraphDestroyNode");
  return true;
}

}  // namespace

void merge_memory_operations(cudaGraph_t graph) {
  Nodes nodes = nodes_of(graph);
  std::erase_if(nodes, [](CUgraphNode node) { return !has_memory_operations(node); });
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    if (nodes[i] == nullptr) continue;  // merged into another one
    for (;;) {
      const Nodes next = after(nodes[i]);
      const auto known = next.size() == 1 ? std::ranges::find(nodes, next.front()) : nodes.end();
      if (known == nodes.end() || before(*known).size() != 1 || !absorb(graph, nodes[i], *known)) {
        break;
      }
      *known = nullptr;
    }
  }
}

}  // namespace annulus

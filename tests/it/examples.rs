//! The programs of `examples/`, which check their own output.

#[path = "../../examples/custom_reranker.rs"]
mod custom_reranker;
#[path = "../../examples/embedding_bag.rs"]
mod embedding_bag;
#[path = "../../examples/index_only.rs"]
mod index_only;
#[path = "../../examples/publish_and_search.rs"]
mod publish_and_search;
#[path = "../../examples/serve.rs"]
mod serve;
#[path = "../../examples/train.rs"]
mod train;

#[test]
fn custom_reranker_runs() {
    custom_reranker::main().unwrap();
}

#[test]
fn embedding_bag_runs() {
    embedding_bag::main().unwrap();
}

#[test]
fn index_only_runs() {
    index_only::main().unwrap();
}

#[test]
fn publish_and_search_runs() {
    publish_and_search::main().unwrap();
}

#[test]
fn serve_runs() {
    serve::main().unwrap();
}

#[test]
fn train_runs() {
    train::main().unwrap();
}

//! openraft's storage suite on this store: a wrong store would break this contract silently.

use openraft::StorageError;
use openraft::testing::log::{StoreBuilder, Suite};
use tempfile::TempDir;

use super::super::TypeConfig;
use super::super::log_store::LogStore;
use super::super::state_machine::StateMachine;

struct SuiteBuilder;

impl StoreBuilder<TypeConfig, LogStore, StateMachine, TempDir> for SuiteBuilder {
    async fn build(&self) -> Result<(TempDir, LogStore, StateMachine), StorageError<TypeConfig>> {
        let directory = TempDir::new().unwrap();
        let (log, _) = super::open(directory.path());
        let machine = StateMachine::open(super::intake(directory.path(), 0)).unwrap();
        Ok((directory, log, machine))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn openraft_storage_suite() {
    Suite::test_all(SuiteBuilder).await.unwrap();
}

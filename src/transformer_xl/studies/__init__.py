"""The paper's questions: ablations, relative effective context length."""

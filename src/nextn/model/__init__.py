"""The trunk (target model), its MTP head, and both with a tokenizer."""
